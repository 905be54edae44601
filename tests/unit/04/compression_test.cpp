// Gradients that travel in 16 bits: how far the mean is off, how many bytes leave, and what keeps
// all its digits.

#include "04-ddp/compression.h"

#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "common/kernels/kernels.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/local_store.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/shm_ranks.h"
#include "tests/support/tcp_stores.h"
#include "tests/unit/04/ddp_group.h"

namespace lockstep {
namespace {

using namespace testing::ddp;
using testing::Member;
using testing::Ranks;
using testing::relative_error;
using testing::Samples;
using testing::small_network;
using Values = std::vector<Real>;

constexpr double kUnit = 0x1p-8;  // to round to bf16 moves a number by this share of it at most

// --- The error -----------------------------------------------------------------------------------

/// Numbers of both signs and of sizes from 1e-20 to 1, whose sums lose digits.
Values gradients_of(int rank, int64_t count) {
  Values values = testing::random_values({count}, uint32_t(rank) + 1);
  for (int64_t i = 0; i < count; ++i) values[size_t(i)] *= Real(std::pow(10.0, -(i % 21)));
  return values;
}

/// x [n] becomes the mean of all ranks' x.
void average(const Bf16Messages& messages, int world_size, const Tensor& x) {
  messages.all_reduce(Real(1) / Real(world_size), x);
}

/// The same, as stage 06 shares out gradients; what is gathered is in bf16 already.
void average_by_shards(const Bf16Messages& messages, int rank, int world_size, const Tensor& x) {
  const int64_t shard = x.elements() / world_size;
  const Tensor mine = x.range(rank * shard, {shard});
  x.home().kernels().scale(x.home(), Real(1) / Real(world_size), x);
  messages.reduce_scatter(x, mine);
  messages.all_gather(mine, x);
}

/// The largest error of a mean, as a part of what k roundings allow: ((1 + u)^k - 1) mean |x|.
double share_of_bound(const Ranks& ranks, int64_t count, int roundings, bool by_shards) {
  std::vector<double> mean(size_t(count), 0), sizes(size_t(count), 0);
  std::vector<Tensor> x;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const Values values = gradients_of(rank, count);
    for (size_t i = 0; i < values.size(); ++i) {
      mean[i] += double(values[i]) / ranks.size();
      sizes[i] += std::abs(double(values[i])) / ranks.size();
    }
    x.push_back(Tensor::from_host(ranks.streams[size_t(rank)], {count}, values));
  }
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const Bf16Messages messages(*ranks.comms[size_t(rank)], ranks.streams[size_t(rank)]);
    if (by_shards) {
      average_by_shards(messages, rank, ranks.size(), x[size_t(rank)]);
    } else {
      average(messages, ranks.size(), x[size_t(rank)]);
    }
  }
  const Values found = x[0].to_host();
  for (const Tensor& others : x) CHECK(others.to_host() == found);
  double largest = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double bound = (std::pow(1 + kUnit, roundings) - 1) * sizes[i];
    largest = std::max(largest, std::abs(double(found[i]) - mean[i]) / bound);
  }
  return largest;
}

TEST_CASE("A mean in bf16 is off by no more than its roundings: two in shared memory, W in a ring",
          "[ddp][allreduce][sixteen]") {
  for (const int world_size : {2, 3, 5}) {
    for (const auto& [numbers, by_shards] : std::vector<std::pair<int64_t, bool>>{
             {7, false}, {1001, false}, {30001, false}, {7, true}, {1001, true}, {30001, true}}) {
      const int64_t count = by_shards ? numbers * world_size : numbers;
      INFO(world_size << " ranks, " << count << " numbers, by shards: " << by_shards);
      const auto share = [&, by = by_shards](const Ranks& ranks, int roundings) {
        return share_of_bound(ranks, count, roundings, by);
      };
      const double shm = share(testing::shm_ranks(world_size), 2);
      const double tcp = share(testing::tcp_ranks(world_size), world_size);
      const double gloo = share(testing::gloo_ranks(world_size), world_size);
      for (const double share : {shm, tcp, gloo}) CHECK(share <= 1.0001);  // float32's roundings
      if (count < 1000) continue;
      for (const double share : {shm, tcp, gloo}) CHECK(share > 0.2);  // it is no empty promise
    }
  }
}

TEST_CASE("What is divided before it is rounded does not overflow where the sum would",
          "[ddp][allreduce][sixteen]") {
  const Ranks ranks = testing::shm_ranks(4);
  std::vector<Tensor> x;
  for (size_t rank = 0; rank < 4; ++rank) {
    x.push_back(Tensor::from_host(ranks.streams[rank], {2}, {Real(0x1p127), Real(-3)}));
    average(Bf16Messages(*ranks.comms[rank], ranks.streams[rank]), 4, x[rank]);
  }
  for (const Tensor& mean : x) CHECK(mean.to_host() == Values{Real(0x1p127), -3});
}

// --- In training ---------------------------------------------------------------------------------

constexpr bool kBoth[] = {false, true};

/// A rank's loss and marks.
Values behind_gradients(int rank, Group& group) {
  const FlatParameters& parameters = group[rank].parameters;
  const Values all = parameters.contribution().to_host();
  return {all.begin() + parameters.gradients().elements(), all.end()};
}

TEST_CASE("With gradients in bf16 ranks stay alike, near the whole batch, with half of the bytes",
          "[ddp][sixteen]") {
  const Samples samples(12);
  const Values expected = single_device_gradients(samples);
  for (const bool manual : kBoth) {
    for (const double megabytes : {0.0, 0.01, 1.0}) {
      INFO((manual ? "manual" : "bucketed") << ", --bucket-mb " << megabytes);
      const auto group_of = [&](Compression compress) {
        auto group = std::make_unique<Group>(
            3, small_network(), ReplicaOptions{.compress = compress, .buckets = {megabytes}},
            manual);
        group->gradients(samples);
        return group;
      };
      const auto half = group_of(Compression::bf16), whole = group_of(Compression::none);
      for (int rank = 0; rank < 3; ++rank) {
        CHECK((*half)[rank].gradients() == (*half)[0].gradients());
        // The loss and the marks keep their digits.
        CHECK(relative_error(behind_gradients(rank, *half), behind_gradients(rank, *whole)) < 1e-6);
        CHECK(behind_gradients(rank, *half) == behind_gradients(0, *half));
      }
      const double error = relative_error((*half)[0].gradients(), expected);
      CHECK((error > 1e-4 && error < 3 * kUnit));
      const auto bytes = [](Group& group) {
        return double(group[0].wrapper().comm().bytes_sent(Purpose::gradients));
      };
      // Half of float32's bytes; a quarter of float64's.
      CHECK(bytes(*half) == Approx(2.0 / sizeof(Real) * bytes(*whole)).epsilon(0.02));
    }
  }
}

TEST_CASE("One rank sends nothing, and rounds nothing", "[ddp][sixteen]") {
  const Samples samples(12);
  Group group(1, small_network(), {.compress = Compression::bf16});
  group.gradients(samples);
  CHECK(group[0].gradients() == single_device_gradients(samples));
}

TEST_CASE("In bf16, too, a gradient that is not finite on one rank stops all of them",
          "[ddp][sixteen][row89]") {
  Group group(3, small_network(), {.compress = Compression::bf16, .buckets = {0}});
  group.step(Samples(12, 1));
  const Values good = group[0].weights();
  Samples spoilt(12, 2);
  spoilt.images[256 + 5] = std::numeric_limits<Real>::quiet_NaN();  // a pixel of rank 1's
  group.step(spoilt);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(group[rank].optimizer.health().to_host()[0].failed_step == 1);
    CHECK(group[rank].weights() == good);
    CHECK(group[rank].wrapper().own_health().to_host()[0].failed_step == (rank == 1 ? 1 : -1));
  }
}

}  // namespace
}  // namespace lockstep
