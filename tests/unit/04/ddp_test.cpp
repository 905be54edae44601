// DistributedDataParallel: gradients and weights of the ranks of a group, which are members in this
// process, joined by Gloo; and what must not be accepted.

#include <algorithm>
#include <limits>

#include "common/core/error.h"
#include "common/core/stream_backend.h"
#include "common/nn/layers.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/ddp_test_support.h"
#include "tests/support/tasks.h"
#include "tests/unit/04/ddp_group.h"

namespace lockstep {
namespace {

using namespace testing::ddp;
using Catch::Matchers::ContainsSubstring;
using testing::kTolerance;
using testing::MakeModule;
using testing::Member;
using testing::message_of;
using testing::relative_error;
using testing::Samples;
using testing::small_network;
using Values = std::vector<Real>;

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

/// All-reduces that the member has made so far.
int64_t all_reduces(const Member& member) {
  member.communication.synchronize();
  return std::ranges::count_if(member.communication.backend().timeline(), [](const Span& span) {
    return std::string(span.op) == "all_reduce";
  });
}

TEST_CASE("Buckets and overlap do not change the gradients", "[ddp][row79]") {
  const Samples samples(12);
  const Values expected = single_device_gradients(samples);
  for (const double megabytes : {0.0, 0.01, 0.1, 1.0, 1e9}) {
    for (const bool overlap : {true, false}) {
      INFO("--bucket-mb " << megabytes << (overlap ? "" : ", no overlap"));
      Group group(3, small_network(), {.buckets = {megabytes}, .no_overlap = !overlap});
      group.gradients(samples);
      for (int rank = 0; rank < 3; ++rank) {
        CHECK(relative_error(group[rank].gradients(), expected) < kTolerance);
      }
      if (megabytes == 0) CHECK(all_reduces(group[0]) == 8);
      if (megabytes == 1) CHECK(all_reduces(group[0]) == 1);
    }
  }
}

TEST_CASE("Whatever reduces them, the gradients are the same", "[ddp][row79]") {
  const Samples samples(12);
  const Values expected = single_device_gradients(samples);
  for (const AllReduceKind kind :
       {AllReduceKind::ring, AllReduceKind::naive, AllReduceKind::library}) {
    Group group(3, small_network(), {.all_reduce = kind, .buckets = {0.01}});
    group.gradients(samples);
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(relative_error(group[rank].gradients(), expected) < kTolerance);
      CHECK(group[rank].gradients() == group[0].gradients());
    }
    if (kind != AllReduceKind::ring) continue;
    // 2 (W-1)/W of the gradients, gaps included, and what does not divide by three.
    const double ring = 4.0 / 3 * double(group[0].parameters.gradients().bytes());
    CHECK(double(group[0].ddp().comm().bytes_sent(Purpose::gradients)) ==
          Approx(ring).epsilon(0.01));
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
    // After the pass each rank has those of its own samples.
    CHECK(statistics(0) != statistics(1));
    const Values before = statistics(0);
    Member alone(0, small_network(ModelKind::seed_bn), 1);
    alone.parameters.buffer_values().copy_from_host(before);
    group.gradients(Samples(12, 2));
    alone.accumulate(Samples(12, 2).every(1, 2), 1);
    // Rank 1 continued from rank 0's, or from its own.
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
  AnyTensor forward(const AnyTensor& x, Context& context) override {
    Tensor y = first_->forward(flatten_->forward(x, context), context);
    if (whole_) y = second_->forward(y, context);
    return end_->forward(y, context);
  }
  AnyTensor backward(const AnyTensor& dy, Context& context) override {
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
          "out of the network, or allow that (--find-unused-parameters)");
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

TEST_CASE("What any rank has used is updated on all, what none has used stays as it is",
          "[ddp][row84]") {
  const bool manual = GENERATE(false, true);
  for (const bool second_rank_has_it : {false, true}) {
    Group group(2, forked(false, second_rank_has_it), {.find_unused_parameters = true}, manual);
    for (int step = 1; step <= 2; ++step) {
      group.gradients(Samples(8));
      for (const auto& member : group.members) {
        const Optimizer adam(member->parameters,
                             {.kind = OptimizerKind::adamw, .weight_decay = 0.5});
        const std::vector<Parameter*>& parameters = adam.parameters();
        std::vector<Values> before;
        for (const Parameter* p : parameters) before.push_back(p->value.to_host());
        adam.step(member->context.state(), member->loss);
        for (size_t i = 0; i < parameters.size(); ++i) {
          INFO(parameters[i]->name << " in step " << step);
          const bool updated = !parameters[i]->name.starts_with("second") || second_rank_has_it;
          CHECK((parameters[i]->value.to_host() != before[i]) == updated);
          CHECK(adam.steps()[i] == (updated ? 1 : 0));
        }
      }
    }
    CHECK(group[1].weights() == group[0].weights());
  }
}

TEST_CASE("What an early micro-batch alone has used is updated on all ranks", "[ddp][row84]") {
  const bool manual = GENERATE(false, true);
  Group group(2, small_network(ModelKind::seed_skip), {.find_unused_parameters = true}, manual);
  for (const auto& member : group.members) member->parameters.zero_gradients();
  for (const bool last : {false, true}) {
    for (const auto& member : group.members) {
      member->context.facts.step = last ? 1 : 0;  // steps 1, 3, ... leave extra.inner out
      member->context.facts.last_contribution = last;
      member->accumulate(Samples(4), 0.25);
    }
  }
  for (const auto& member : group.members) {
    const Optimizer adam(member->parameters, {.kind = OptimizerKind::adamw});
    adam.step(member->context.state(), member->loss);
    CHECK(adam.steps() == std::vector<int64_t>(10, 1));
  }
  CHECK(group[1].weights() == group[0].weights());
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
