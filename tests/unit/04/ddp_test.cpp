// DistributedDataParallel: the ranks of a group as members in this process, joined by Gloo.

#include <algorithm>
#include <chrono>
#include <future>
#include <limits>
#include <thread>

#include "04-ddp/join.h"
#include "04-ddp/manual_ddp.h"
#include "common/core/error.h"
#include "common/core/stream_backend.h"
#include "common/nn/layers.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/ddp_test_support.h"
#include "tests/support/local_store.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using std::chrono::milliseconds;
using testing::kLong;
using testing::kTolerance;
using testing::MakeModule;
using testing::Member;
using testing::message_of;
using testing::relative_error;
using testing::Samples;
using testing::small_network;
using Values = std::vector<Real>;

/// The ranks of a group, whose members begin with different weights. One host thread enqueues the
/// passes of all: nothing that is enqueued waits for the host.
class Group {
 public:
  explicit Group(int world_size, const MakeModule& make = small_network(),
                 const DdpOptions& options = {}, bool manual = false)
      : manual_(manual), ranks_(testing::gloo_ranks(world_size)) {
    std::vector<std::future<void>> wrapped;
    for (int rank = 0; rank < world_size; ++rank) {
      members.push_back(std::make_unique<Member>(rank, make, uint64_t(rank) + 1));
    }
    for (int rank = 0; rank < world_size; ++rank) {
      wrapped.push_back(std::async(std::launch::async, [&, rank] { wrap(rank, options); }));
    }
    for (std::future<void>& rank : wrapped) rank.wait();
    for (std::future<void>& rank : wrapped) {
      errors.push_back(message_of<BadInput>([&] { rank.get(); }));
    }
  }

  int size() const { return ranks_.size(); }
  Member& operator[](int rank) { return *members[size_t(rank)]; }

  /// The gradients of the mean over `samples`, dealt to the ranks; rank r's are in operator[](r).
  void gradients(const Samples& samples) {
    for (int rank = 0; rank < size(); ++rank) {
      Member& member = (*this)[rank];
      member.parameters.zero_gradients();
      member.accumulate(samples.every(rank, size()), double(size()) / double(samples.count()));
    }
  }
  void step(const Samples& samples) {
    gradients(samples);
    for (const auto& member : members) {
      member->optimizer.step(member->context.state(), member->loss);
      ++member->steps;
    }
  }

  Communicator& communicator(int rank) { return *ranks_.processes[size_t(rank)]; }
  /// Closes a rank's connections.
  void leave(int rank) { ranks_.processes[size_t(rank)].reset(); }

  std::vector<std::unique_ptr<Member>> members;
  std::vector<std::string> errors;  // of the construction, by rank; "" where there was none

 private:
  void wrap(int rank, const DdpOptions& options) {
    Member& member = (*this)[rank];
    if (manual_) {
      member.network = std::make_unique<ManualDdp>(std::move(member.network), member.parameters,
                                                   *ranks_.processes[size_t(rank)],
                                                   member.communication, options.all_reduce);
      return;
    }
    const auto exchange = [&](const std::string& mine) {
      return store_.exchange(rank, size(), mine);
    };
    member.network = std::make_unique<DistributedDataParallel>(
        std::move(member.network), member.parameters, *ranks_.processes[size_t(rank)], exchange,
        member.communication, options);
  }

  bool manual_;
  testing::LocalStore store_;
  testing::Ranks ranks_;
};

/// What one device makes of the same samples, beginning with rank 0's weights.
Values single_device_gradients(const Samples& samples, const MakeModule& make = small_network()) {
  Member whole(0, make, 1);
  whole.accumulate(samples, 1.0 / double(samples.count()));
  return whole.gradients();
}

// --- Gradients -----------------------------------------------------------------------------------

TEST_CASE("The ranks' gradients are those of the whole batch", "[ddp][row75][row76]") {
  for (const int world_size : {1, 2, 3, 4, 8}) {
    for (const int64_t count : {24, 19, 3}) {  // 3: some ranks have no samples
      INFO(world_size << " ranks, " << count << " samples");
      const Samples samples(count);
      const Values expected = single_device_gradients(samples);
      Group group(world_size);
      group.gradients(samples);
      for (int rank = 0; rank < world_size; ++rank) {
        CHECK(relative_error(group[rank].gradients(), expected) < kTolerance);
        CHECK(group[rank].gradients() == group[0].gradients());
      }
    }
  }
}

TEST_CASE("One rank alone is a network by itself, to the bit", "[ddp][row75]") {
  const Samples samples(12);
  Group group(1);
  group.gradients(samples);
  CHECK(group[0].gradients() == single_device_gradients(samples));
}

TEST_CASE("Means of unequal shards, unweighted, are not the mean of the batch", "[ddp][row76]") {
  const Samples samples(24);
  Group group(2);
  int64_t first = 0;
  for (const int64_t count : {21, 3}) {
    Samples part = samples.every(first, 1);
    part.images.resize(size_t(count) * 256);
    part.labels.resize(size_t(count));
    Member& member = group[first == 0 ? 0 : 1];
    member.parameters.zero_gradients();
    member.accumulate(part, 1.0 / double(count));
    first += count;
  }
  CHECK(relative_error(group[0].gradients(), single_device_gradients(samples)) > 0.05);
}

TEST_CASE("Buckets and overlap do not change the gradients", "[ddp][row79]") {
  const Samples samples(12);
  const Values expected = single_device_gradients(samples);
  for (const double megabytes : {0.0, 0.01, 0.1, 1.0, 1e9}) {
    for (const bool overlap : {true, false}) {
      INFO("--bucket-mb " << megabytes << (overlap ? "" : ", no overlap"));
      Group group(3, small_network(), {.caps = BucketCaps::equal(megabytes), .overlap = overlap});
      if (megabytes == 0) CHECK(group[0].ddp().buckets().size() == 8);
      if (megabytes == 1) CHECK(group[0].ddp().buckets().size() == 1);
      group.gradients(samples);
      for (int rank = 0; rank < 3; ++rank) {
        CHECK(relative_error(group[rank].gradients(), expected) < kTolerance);
      }
    }
  }
}

TEST_CASE("Whatever reduces them, the gradients are the same", "[ddp][row79]") {
  const Samples samples(12);
  const Values expected = single_device_gradients(samples);
  for (const AllReduceKind kind :
       {AllReduceKind::ring, AllReduceKind::naive, AllReduceKind::library}) {
    Group group(3, small_network(), {.caps = BucketCaps::equal(0.01), .all_reduce = kind});
    group.gradients(samples);
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(relative_error(group[rank].gradients(), expected) < kTolerance);
      CHECK(group[rank].gradients() == group[0].gradients());
    }
    if (kind != AllReduceKind::ring) continue;
    // 2 (W-1)/W of the gradients, gaps included, and what does not divide by three.
    const double ring = 4.0 / 3 * double(group[0].parameters.gradients().bytes());
    CHECK(double(group[0].ddp().bytes_sent()) == Approx(ring).epsilon(0.01));
  }
}

TEST_CASE("Written by hand, parameter by parameter, the gradients are the same", "[ddp][row75]") {
  for (const int64_t count : {12, 3}) {
    const Samples samples(count);
    const Values expected = single_device_gradients(samples);
    for (const AllReduceKind kind :
         {AllReduceKind::ring, AllReduceKind::naive, AllReduceKind::library}) {
      Group group(4, small_network(), {.all_reduce = kind}, /*manual=*/true);
      for (int rank = 0; rank < 4; ++rank) CHECK(group[rank].weights() == group[0].weights());
      group.gradients(samples);
      for (int rank = 0; rank < 4; ++rank) {
        CHECK(relative_error(group[rank].gradients(), expected) < kTolerance);
        CHECK(group[rank].gradients() == group[0].gradients());
      }
    }
  }
}

TEST_CASE("The loss becomes the mean over the whole batch on every rank", "[ddp][row90]") {
  const Samples samples(13);
  Member alone(0, small_network(), 1);
  alone.accumulate(samples, 1.0 / 13);
  const double expected = double(alone.loss.to_host()[0]);
  Group group(3);
  for (int rank = 0; rank < 3; ++rank) {
    Member& member = group[rank];
    member.accumulate(samples.every(rank, 3), 3.0 / 13);
  }
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(double(group[rank].loss.to_host()[0]) == Approx(expected).epsilon(kTolerance));
    CHECK(group[rank].loss.to_host() == group[0].loss.to_host());
  }
}

// --- Ranks that run out of samples ---------------------------------------------------------------

TEST_CASE("Ranks with unequally many batches are told apart at once, or joined",
          "[ddp][join][row86]") {
  testing::LocalStore store;
  const std::vector<std::string> errors = testing::run_ranks(3, [&](int rank) {
    require_even_inputs(rank == 1 ? 4 : 5,
                        [&](const std::string& mine) { return store.exchange(rank, 3, mine); });
  });
  for (const std::string& error : errors) {
    CHECK_THAT(error, ContainsSubstring("batches of this epoch by rank: 5, 4, 5; expected equally "
                                        "many"));
  }

  testing::Ranks ranks = testing::gloo_ranks(2);
  std::vector<std::vector<int64_t>> seen(2);
  testing::run_ranks(2, [&](int rank) {
    Join join(*ranks.processes[size_t(rank)], ranks.streams[size_t(rank)]);
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
    Join join(*ranks.processes[size_t(rank)], ranks.streams[size_t(rank)],
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

/// Keeps the device busy for 20 ms before it goes back through the layers in front.
class Slow final : public Module {
 public:
  Tensor forward(const Tensor& x, Context&) override { return x; }
  Tensor backward(const Tensor& dy, Context& context) override {
    testing::enqueue(context.stream(), "slow",
                     [] { std::this_thread::sleep_for(milliseconds(20)); });
    return dy;
  }
};

/// The seed network with slow layers behind its first and its last one.
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
  Group group(2, slow_network, {.caps = BucketCaps::equal(0)}), plain(2);
  for (int i = 0; i < 2; ++i) {
    group.step(Samples(12, uint32_t(i)));
    plain.step(Samples(12, uint32_t(i)));
  }
  CHECK(relative_error(group[1].weights(), plain[1].weights()) < kTolerance);
}

TEST_CASE("The first reduction runs while backward does, unless that is turned off",
          "[ddp][row80]") {
  for (const bool overlap : {true, false}) {
    Group group(2, slow_network, {.caps = BucketCaps::equal(0), .overlap = overlap});
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

// --- Weights -------------------------------------------------------------------------------------

TEST_CASE("All ranks begin with rank 0's parameters and buffers", "[ddp][row74]") {
  Group group(3, small_network(ModelKind::seed_bn));
  for (int rank = 1; rank < 3; ++rank) {
    CHECK(group[rank].weights() == group[0].weights());
    CHECK(group[rank].parameters.buffer_values().to_host() ==
          group[0].parameters.buffer_values().to_host());
  }
  const Member first(0, small_network(ModelKind::seed_bn), 1),
      second(1, small_network(ModelKind::seed_bn), 2);
  CHECK(group[0].weights() == first.weights());
  CHECK(group[0].parameters.buffer_values().to_host() ==
        first.parameters.buffer_values().to_host());
  CHECK(second.parameters.buffer_values().to_host() != first.parameters.buffer_values().to_host());
}

TEST_CASE("The ranks' weights stay the same to the bit", "[ddp][row77]") {
  for (const int world_size : {2, 3}) {
    Group group(world_size);
    for (int i = 0; i < 20; ++i) {
      group.step(Samples(i % 3 == 0 ? 7 : 12, uint32_t(i)));
      const Values first = group[0].weights();
      for (int rank = 1; rank < world_size; ++rank) REQUIRE(group[rank].weights() == first);
    }
  }
}

TEST_CASE("A gradient that is not finite on one rank stops all of them in the same step",
          "[ddp][row89]") {
  Group group(3);
  group.step(Samples(12, 1));
  const Values good = group[0].weights();
  Samples spoilt(12, 2);
  spoilt.images[256 + 5] = std::numeric_limits<Real>::quiet_NaN();  // a pixel of rank 1's
  group.step(spoilt);
  group.step(Samples(12, 3));
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(group[rank].optimizer.health().to_host()[0].failed_step == 1);
    CHECK(group[rank].weights() == good);
    // The others know that it was not they.
    CHECK(group[rank].wrapper().own_health().to_host()[0].failed_step == (rank == 1 ? 1 : -1));
  }
}

TEST_CASE("Running statistics are rank 0's at every forward", "[ddp][row87]") {
  for (const bool broadcast : {true, false}) {
    Group group(2, small_network(ModelKind::seed_bn), {.broadcast_buffers = broadcast});
    const auto statistics = [&](int rank) {
      return group[rank].parameters.buffer_values().to_host();
    };
    group.gradients(Samples(12, 1));
    // Behind the pass each rank has those of its own samples.
    CHECK(statistics(0) != statistics(1));
    const Values before = statistics(0);
    Member alone(0, small_network(ModelKind::seed_bn), 1);
    alone.parameters.buffer_values().copy_from_host(before);
    group.gradients(Samples(12, 2));
    alone.accumulate(Samples(12, 2).every(1, 2), 1);
    // Rank 1 went on from rank 0's, or from its own.
    CHECK((relative_error(statistics(1), alone.parameters.buffer_values().to_host()) <
           kTolerance) == broadcast);
  }
}

TEST_CASE("A rank may evaluate alone", "[ddp][row88]") {
  Group group(2, small_network(ModelKind::seed_bn));
  group.gradients(Samples(12));
  Member& member = group[0];
  member.context.facts.training = false;
  const Tensor images = Tensor::from_host(member.stream, {4, 16, 16, 1}, Samples(4).images);
  const Values wrapped = member.network->forward(images, member.context).to_host();
  CHECK(member.ddp().inner().forward(images, member.context).to_host() == wrapped);
  CHECK(wrapped.size() == 40);
}

// --- What must not pass --------------------------------------------------------------------------

/// A network whose second layer is left out by some ranks.
class Forked final : public Module {
 public:
  explicit Forked(bool whole) : whole_(whole) {
    flatten_ = &add_module("flatten", std::make_unique<Flatten>());
    first_ = &add_module("first", std::make_unique<Linear>(256, 10));
    second_ = &add_module("second", std::make_unique<Linear>(10, 10));
    end_ = &add_module("end", std::make_unique<LogSoftmax>());
  }
  Tensor forward(const Tensor& x, Context& context) override {
    Tensor y = first_->forward(flatten_->forward(x, context), context);
    if (whole_) y = second_->forward(y, context);
    return end_->forward(y, context);
  }
  Tensor backward(const Tensor& dy, Context& context) override {
    Tensor dx = end_->backward(dy, context);
    if (whole_) dx = second_->backward(dx, context);
    return flatten_->backward(first_->backward(dx, context), context);
  }

 private:
  bool whole_;
  Module *flatten_, *first_, *second_, *end_;
};

MakeModule forked(bool first, bool second) {
  return [=](int rank) {
    auto network = std::make_unique<Forked>(rank == 0 ? first : second);
    network->set_name("");
    return network;
  };
}

TEST_CASE("A parameter without a gradient is named, or counts as zeros", "[ddp][row83][row84]") {
  {
    Group group(1, forked(false, false));
    CHECK(message_of<BadInput>([&] { group.gradients(Samples(4)); }) ==
          "rank 0: no gradient of second.bias, second.weight in this backward; leave such layers "
          "out of the network, or allow unused parameters");
  }
  for (const bool second_rank_has_it : {false, true}) {
    Group group(2, forked(false, second_rank_has_it), {.find_unused_parameters = true});
    group.gradients(Samples(8));
    CHECK(group[1].gradients() == group[0].gradients());
    for (Parameter* p : group[0].network->parameters()) {
      const Values values = p->grad.to_host();
      const bool zeros = std::all_of(values.begin(), values.end(), [](Real x) { return x == 0; });
      INFO(p->name);
      CHECK(zeros == (p->name.starts_with("second") && !second_rank_has_it));
    }
  }
}

TEST_CASE("Where one rank alone leaves a layer out, both end with an error", "[ddp][row84]") {
  Group group(2, forked(true, false));
  CHECK_THAT(message_of<BadInput>([&] { group.gradients(Samples(8)); }),
             ContainsSubstring("rank 1: no gradient of second.bias, second.weight"));
  group.leave(1);  // as the process that this error ends
  const auto begin = testing::Clock::now();
  CHECK_THAT(message_of<PeerLost>([&] { group[0].stream.synchronize(); }),
             ContainsSubstring("rank 0: collective "));
  CHECK(testing::seconds_since(begin) < testing::kSoon);
}

TEST_CASE("Ranks with different networks are all told so", "[ddp][row85]") {
  const auto different = [](int rank) {
    auto network = std::make_unique<Sequential>();
    network->add("flatten", std::make_unique<Flatten>());
    network->add("fc", std::make_unique<Linear>(256, rank == 1 ? 4 : 5));
    if (rank == 2) network->add("more", std::make_unique<Linear>(5, 5));
    network->set_name("");
    return network;
  };
  Group shape(2, different);
  for (const std::string& error : shape.errors) {
    CHECK(error ==
          "parameter 0: rank 0 has fc.weight [5, 256], rank 1 has fc.weight [4, 256]; "
          "all ranks must build the same network");
  }
  Group number(3, [&](int rank) { return different(rank == 1 ? 0 : rank); });
  for (const std::string& error : number.errors) {
    CHECK_THAT(error, ContainsSubstring("rank 0 has nothing, rank 2 has more.weight [5, 5]"));
  }
}

}  // namespace
}  // namespace lockstep
