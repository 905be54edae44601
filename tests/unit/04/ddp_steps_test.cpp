// Steps of DistributedDataParallel: ranks that run out of samples, several passes, and times.

#include <algorithm>
#include <chrono>
#include <thread>

#include "04-ddp/join.h"
#include "04-ddp/manual_ddp.h"
#include "common/core/stream_backend.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/ddp_test_support.h"
#include "tests/support/local_store.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tasks.h"
#include "tests/support/tcp_stores.h"
#include "tests/unit/04/ddp_group.h"

namespace lockstep {
namespace {

using namespace testing::ddp;
using Catch::Matchers::ContainsSubstring;
using std::chrono::milliseconds;
using testing::kLong;
using testing::kTolerance;
using testing::Member;
using testing::relative_error;
using testing::Samples;
using testing::small_network;
using Values = std::vector<Real>;

// --- Ranks that run out of samples ---------------------------------------------------------------

TEST_CASE("Ranks with unequally many batches are told apart at once, or joined",
          "[ddp][join][row86]") {
  testing::LocalStore store;
  const std::vector<std::string> errors = testing::run_ranks(3, [&](int rank) {
    require_even_inputs(rank == 1 ? 4 : 5,
                        [&](const std::string& mine) { return store.exchange(rank, 3, mine); });
  });
  for (const std::string& error : errors) {
    CHECK_THAT(error, ContainsSubstring("batches of this epoch: rank 0 has 5, rank 1 has 4; "));
  }

  testing::Ranks ranks = testing::gloo_ranks(2);
  std::vector<std::vector<int64_t>> seen(2);
  testing::run_ranks(2, [&](int rank) {
    Join join(*ranks.comms[size_t(rank)], ranks.streams[size_t(rank)]);
    for (int64_t step = 0;; ++step) {
      const int64_t mine = rank == 0 ? (step < 3 ? 4 : 0) : (step < 1 ? 2 : 0);
      seen[size_t(rank)].push_back(join.samples_of_step(mine));
      if (seen[size_t(rank)].back() == 0) return;
    }
  });
  CHECK(seen[0] == std::vector<int64_t>{6, 4, 4, 0});
  CHECK(seen[1] == seen[0]);
}

/// Rank 0's three batches and rank 1's single one.
Samples uneven_batch(int rank, int step) {
  const bool has = rank == 0 ? step < 3 : step < 1;
  return has ? Samples(rank == 0 ? 4 : 2, uint32_t(10 * rank + step + 1)) : Samples(0);
}

TEST_CASE("Ranks that run out of samples at different times train as one process does",
          "[ddp][join][row86]") {
  Group group(2);
  testing::run_ranks(2, [&](int rank) {
    Member& member = group[rank];
    Join join(group.communicator(rank), member.stream);
    for (int step = 0;; ++step) {
      const Samples mine = uneven_batch(rank, step);
      const int64_t all = join.samples_of_step(mine.count());
      if (all == 0) return;
      member.parameters.zero_gradients();
      member.accumulate(mine, 2.0 / double(all));
      member.optimizer.step(member.context.state(), member.loss);
      ++member.steps;
      member.stream.synchronize();
    }
  });
  Member alone(0, small_network(), 1);
  for (int step = 0; step < 3; ++step) {
    const Samples parts[] = {uneven_batch(0, step), uneven_batch(1, step)};
    alone.parameters.zero_gradients();
    for (const Samples& part : parts) {
      if (part.count() == 0) continue;
      alone.accumulate(part, 1.0 / double(parts[0].count() + parts[1].count()));
    }
    alone.optimizer.step(alone.context.state(), alone.loss);
    ++alone.steps;
  }
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(group[rank].steps == 3);
    CHECK(relative_error(group[rank].weights(), alone.weights()) < kTolerance);
  }
}

TEST_CASE("Ranks may be told to end together as soon as one has no samples", "[ddp][join][row86]") {
  testing::Ranks ranks = testing::gloo_ranks(3);
  const std::vector<std::string> errors = testing::run_ranks(3, [&](int rank) {
    Join join(*ranks.comms[size_t(rank)], ranks.streams[size_t(rank)],
              Join::EarlyEnd::throw_on_all_ranks);
    join.samples_of_step(4);
    join.samples_of_step(rank == 1 ? 0 : 4);
  });
  for (const std::string& error : errors) {
    CHECK_THAT(error, ContainsSubstring("step 1: 1 of 3 ranks have run out of samples"));
  }
}

TEST_CASE("Gradients of several passes add up, and are reduced with the last", "[ddp][row81]") {
  const Samples samples(12);
  const Values expected = single_device_gradients(samples);
  for (const int passes : {1, 2, 4}) {
    Group group(2);
    for (int rank = 0; rank < 2; ++rank) {
      Member& member = group[rank];
      member.parameters.zero_gradients();
      for (int pass = 0; pass < passes; ++pass) {
        member.context.facts.last_contribution = pass + 1 == passes;
        member.accumulate(samples.every(pass * 2 + rank, 2 * passes), 2.0 / 12);
        if (pass + 1 == passes) continue;
        // Nothing was reduced: these are the rank's own.
        Member alone(0, small_network(), 1);
        for (int i = 0; i <= pass; ++i) {
          alone.accumulate(samples.every(i * 2 + rank, 2 * passes), 2.0 / 12);
        }
        CHECK(relative_error(member.gradients(), alone.gradients()) < kTolerance);
      }
    }
    for (int rank = 0; rank < 2; ++rank) {
      CHECK(relative_error(group[rank].gradients(), expected) < kTolerance);
    }
  }
}

TEST_CASE("Whether a pass communicates is decided when its backward is enqueued", "[ddp][row82]") {
  const Samples samples(12);
  for (const bool communicates : {true, false}) {
    Group group(2);
    for (int rank = 0; rank < 2; ++rank) {
      Member& member = group[rank];
      const Samples part = samples.every(rank, 2);
      // Forward says the opposite (PyTorch goes by what forward says).
      member.context.facts.last_contribution = !communicates;
      member.parameters.zero_gradients();
      member.context.state().copy_from_host({{.loss_weight = Real(2) / 12}});
      const Tensor images =
          Tensor::from_host(member.stream, {part.count(), 16, 16, 1}, part.images);
      const LabelTensor labels = LabelTensor::from_host(member.stream, {part.count()}, part.labels);
      const Tensor scores = member.network->forward(images, member.context);
      member.criterion->forward(scores, labels, member.loss, member.context);
      member.context.facts.last_contribution = communicates;
      member.network->backward(member.criterion->backward(labels, member.context), member.context);
    }
    CHECK((group[0].gradients() == group[1].gradients()) == communicates);
    CHECK((relative_error(group[0].gradients(), single_device_gradients(samples)) < kTolerance) ==
          communicates);
  }
}

/// Keeps the device busy for 20 ms before backward continues with the layers before it.
class Slow final : public Module {
 public:
  AnyTensor forward(const AnyTensor& x, Context&) override { return x; }
  AnyTensor backward(const AnyTensor& dy, Context& context) override {
    testing::enqueue(context.stream(), "slow",
                     [] { std::this_thread::sleep_for(milliseconds(20)); });
    return dy;
  }
};

/// The seed network with slow layers after its first and its last one.
std::unique_ptr<Module> slow_network(int rank) {
  auto whole = small_network()(rank);
  auto network = std::make_unique<Sequential>();
  Layers layers = static_cast<Sequential&>(*whole).release_layers();
  for (size_t i = 0; i < layers.size(); ++i) {
    const std::string name = layers[i]->name();
    network->add(name, std::move(layers[i]));
    if (i == 0 || i + 1 == layers.size()) network->add("slow_" + name, std::make_unique<Slow>());
  }
  return network;
}

TEST_CASE("The times of steps are those of their parts", "[ddp][row80]") {
  Group group(2, slow_network);
  const auto begin = testing::Clock::now();
  for (int i = 0; i < 3; ++i) group.step(Samples(12));
  for (int rank = 0; rank < 2; ++rank) group[rank].stream.synchronize();
  const double all = testing::seconds_since(begin);
  for (int rank = 0; rank < 2; ++rank) {
    const StepTimes times = group[rank].wrapper().times(3);
    CHECK(times.compute >= 0.040);  // two slow layers
    CHECK(times.compute < kLong);
    CHECK(times.communication > 0);
    CHECK(times.exposed > 0);
    CHECK(3 * (times.compute + times.exposed) <= all);  // one comes after the other
    CHECK((times.hidden() >= 0 && times.hidden() <= 1));
  }
  const StepTimes hidden{.compute = 1, .communication = 0.4, .exposed = 0.1};
  CHECK(hidden.hidden() == Approx(0.75));
  CHECK(hidden.hand_over() == 0);
  const StepTimes handed{.compute = 1, .communication = 0.4, .exposed = 0.7};
  CHECK(handed.hidden() == 0);
  CHECK(handed.hand_over() == Approx(0.3));
  CHECK(hidden.text(true) ==
        "compute 1000.00, communication 400.00 (75 % hidden), exposed 100.00, hand-over 0.00");
  CHECK_THAT(hidden.text(false), !Catch::Matchers::ContainsSubstring("%"));
  CHECK(handed.text(true) ==  // two buckets on cores that are busy: no "0 % hidden"
        "compute 1000.00, communication 400.00, exposed 400.00, hand-over 300.00");
}

TEST_CASE("Only several buckets with overlap can be hidden behind backward", "[ddp]") {
  CHECK_FALSE(Group(2)[0].wrapper().overlaps());  // one bucket, complete when backward has ended
  CHECK(Group(2, small_network(), {.buckets = {0}})[0].wrapper().overlaps());
  const ReplicaOptions late{.buckets = {0}, .no_overlap = true};
  CHECK_FALSE(Group(2, small_network(), late)[0].wrapper().overlaps());
}

TEST_CASE("Communication takes as long as the reductions, with the waiting for a slower rank",
          "[ddp][row80]") {
  Group group(2);
  testing::enqueue(group[1].communication, [] { std::this_thread::sleep_for(milliseconds(40)); });
  group.step(Samples(12));
  for (int rank = 0; rank < 2; ++rank) {
    const StepTimes times = group[rank].wrapper().times(1);
    double reductions = 0;
    for (const Span& span : group[rank].communication.backend().timeline()) {
      if (std::string(span.op) == "all_reduce") reductions += double(span.end_ns - span.begin_ns);
    }
    CHECK(reductions > 0);
    CHECK(times.communication >= 1e-9 * reductions);
  }
}

TEST_CASE("Reductions wait for slow kernels, and the optimizer for reductions",
          "[ddp][tsan][row127]") {
  Group group(2, slow_network, {.buckets = {0}}), plain(2);
  for (int i = 0; i < 2; ++i) {
    group.step(Samples(12, uint32_t(i)));
    plain.step(Samples(12, uint32_t(i)));
  }
  CHECK(relative_error(group[1].weights(), plain[1].weights()) < kTolerance);
}

TEST_CASE("The first reduction runs while backward does, unless that is turned off",
          "[ddp][row80]") {
  for (const bool overlap : {true, false}) {
    Group group(2, slow_network, {.buckets = {0}, .no_overlap = !overlap});
    group.gradients(Samples(12));
    std::vector<std::vector<std::string>> order;
    for (const auto& member : group.members) {
      for (const Stream& stream : {member->stream, member->communication}) stream.synchronize();
      const std::vector<Span> reductions = member->communication.backend().timeline();
      const std::vector<Span> passes = member->stream.backend().timeline();
      const auto is_slow = [](const Span& span) { return std::string(span.op) == "slow"; };
      const auto last_slow = std::find_if(passes.rbegin(), passes.rend(), is_slow);
      const auto first_reduction =
          std::find_if(reductions.begin(), reductions.end(),
                       [](const Span& span) { return std::string(span.op) == "all_reduce"; });
      REQUIRE((last_slow != passes.rend() && first_reduction != reductions.end()));
      CHECK((first_reduction->begin_ns < last_slow->end_ns) == overlap);
      order.emplace_back();
      for (const Span& span : reductions) order.back().push_back(span.op);
    }
    CHECK(order[0] == order[1]);
    CHECK(std::count(order[0].begin(), order[0].end(), "all_reduce") == 8);
  }
}

TEST_CASE("From a step's first pass to its last one all time is that of the passes", "[ddp]") {
  const testing::Ranks ranks = testing::tcp_ranks(2);
  std::vector<double> compute(2);
  const std::vector<std::string> errors = testing::run_ranks(2, [&](int rank) {
    testing::Member member(rank, testing::small_network(), 1);
    member.network = std::make_unique<ManualDdp>(std::move(member.network), member.parameters,
                                                 *ranks.comms[size_t(rank)], member.communication,
                                                 AllReduceKind::library);
    for (const bool last : {false, true}) {
      member.context.facts.last_contribution = last;
      member.accumulate(testing::Samples(2), 1);
      if (last) break;
      testing::enqueue(member.stream,
                       [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
    }
    compute[size_t(rank)] = member.wrapper().times(1).compute;
  });
  CHECK(errors == std::vector<std::string>(2));
  for (const double seconds : compute) CHECK(seconds >= 0.020);
}

}  // namespace
}  // namespace lockstep
