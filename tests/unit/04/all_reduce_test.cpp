// The all-reduces written out: against a plain sum, over Gloo's sends and receives.

#include "04-ddp/all_reduce.h"

#include <deque>
#include <memory>
#include <utility>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/local_store.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/shm_peers.h"

namespace lockstep {
namespace {

using testing::gloo_ranks;
using testing::kDouble;
using testing::Ranks;
using Values = std::vector<Real>;

constexpr AllReduceKind kKinds[] = {AllReduceKind::ring, AllReduceKind::naive,
                                    AllReduceKind::library};

/// What every rank has after its all-reduce of random numbers, and what it sent.
struct Sums {
  Sums(Ranks& ranks, AllReduceKind kind, int64_t count) {
    std::vector<Tensor> x;
    std::deque<AllReduce> reduce;
    std::vector<int64_t> sent_before;
    for (const auto& comm : ranks.comms) {
      sent_before.push_back(comm->bytes_sent(Purpose::gradients));
    }
    expected.assign(static_cast<size_t>(count), 0);
    for (int rank = 0; rank < ranks.size(); ++rank) {
      const Values values = testing::random_values({count}, static_cast<uint32_t>(rank) + 1);
      for (size_t i = 0; i < values.size(); ++i) expected[i] += values[i];
      x.push_back(Tensor::from_host(ranks.streams[size_t(rank)], {count}, values));
      reduce.emplace_back(*ranks.comms[size_t(rank)], kind, ranks.streams[size_t(rank)]);
      reduce.back()(x.back());
    }
    for (const Tensor& sum : x) found.push_back(sum.to_host());
    for (const auto& comm : ranks.comms) {
      bytes_sent.push_back(comm->bytes_sent(Purpose::gradients) - sent_before[comm->rank()]);
    }
  }
  Values expected;
  std::vector<Values> found;
  std::vector<int64_t> bytes_sent;
};

TEST_CASE("Every way of reducing gives all ranks the same sum", "[ddp][allreduce][row70]") {
  for (int world_size = 1; world_size <= 5; ++world_size) {
    Ranks ranks = gloo_ranks(world_size);
    for (const AllReduceKind kind : kKinds) {
      for (const int64_t count : {0, 1, world_size - 1, world_size, world_size + 1, 100001}) {
        INFO(world_size << " ranks, kind " << int(kind) << ", " << count << " numbers");
        const Sums sums(ranks, kind, count);
        for (const Values& found : sums.found) {
          CHECK((count == 0 ||
                 testing::relative_error(found, sums.expected) < (kDouble ? 1e-15 : 1e-6)));
          CHECK(found == sums.found[0]);
        }
      }
    }
  }
}

TEST_CASE("A ring sends 2 (W-1)/W of the numbers from every rank, the naive way all from one",
          "[ddp][allreduce][row130]") {
  constexpr int64_t kCount = 1000, kBytes = kCount * int64_t{sizeof(Real)};
  for (const int64_t world_size : {1, 2, 4, 5}) {
    Ranks ranks = gloo_ranks(static_cast<int>(world_size));
    for (const int64_t sent : Sums(ranks, AllReduceKind::ring, kCount).bytes_sent) {
      CHECK(sent * world_size == 2 * (world_size - 1) * kBytes);
    }
    const Sums naive(ranks, AllReduceKind::naive, kCount);
    for (size_t rank = 0; rank < naive.bytes_sent.size(); ++rank) {
      CHECK(naive.bytes_sent[rank] == (rank == 0 ? (world_size - 1) * kBytes : kBytes));
    }
  }
}

/// Passes calls on to another transport, each so many times.
class Repeating final : public HostTransport {
 public:
  Repeating(std::shared_ptr<HostTransport> transport, int times)
      : transport_(std::move(transport)), times_(times) {}
  std::string description() const override { return transport_->description(); }
  void run(const Call& collective, uint64_t number) override {
    for (int time = 0; time < times_; ++time) transport_->run(collective, number);
  }
  void transfer(const std::vector<Call>& calls) override {
    for (int time = 0; time < times_; ++time) transport_->transfer(calls);
  }
  int64_t bytes_sent() const override { return transport_->bytes_sent(); }

 private:
  std::shared_ptr<HostTransport> transport_;
  int times_;
};

TEST_CASE("A message too many, or too few, is in what a rank has sent", "[ddp][allreduce]") {
  constexpr int64_t kCount = 9000, kBytes = kCount * int64_t{sizeof(Real)};
  for (const int times : {1, 2, 0}) {
    auto peers = testing::shm_peers(2, /*timeout_seconds=*/20);
    Ranks ranks(2, [&](int rank) {
      return std::make_shared<Repeating>(make_shm_transport(std::move(peers[size_t(rank)])), times);
    });
    for (const AllReduceKind kind : kKinds) {
      INFO(times << " times, kind " << int(kind));
      for (const int64_t sent : Sums(ranks, kind, kCount).bytes_sent) CHECK(sent == times * kBytes);
    }
  }
}

}  // namespace
}  // namespace lockstep
