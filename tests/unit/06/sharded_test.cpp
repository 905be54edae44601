// Units on several ranks: what is where, and when.

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

#include "common/core/error.h"
#include "common/core/sixteen_bits.h"
#include "common/nn/layers.h"
#include "tests/support/catch.h"
#include "tests/support/tasks.h"
#include "tests/unit/06/sharded_runs.h"

namespace lockstep {
namespace {

using namespace testing::sharded;
using Catch::Matchers::ContainsSubstring;
using testing::kTolerance;
using testing::MakeModule;
using testing::relative_error;
using testing::Samples;
using testing::small_network;
using Errors = std::vector<std::string>;

constexpr ShardKind kShardKinds[] = {ShardKind::none, ShardKind::optimizer, ShardKind::gradients,
                                     ShardKind::parameters};

const std::vector<Samples>& four_steps() {
  static const std::vector<Samples> steps{Samples(6, 1), Samples(7, 2), Samples(1, 3),
                                          Samples(6, 4)};
  return steps;
}

TEST_CASE("Ranks that share out anything end with one device's weights", "[sharded][tsan]") {
  for (const OptimizerRule& rule : {kMomentum, kAdam}) {
    const Values expected = single_device_weights(four_steps(), rule);
    for (const ShardKind kind : kShardKinds) {
      for (const int ranks : {1, 2, 3}) {
        if (rule.kind == kAdam.kind && ranks < 3 && !testing::full_campaign()) continue;
        INFO("kind " << int(kind) << ", " << ranks << " ranks");
        std::vector<Values> found(static_cast<size_t>(ranks));
        const Errors errors = on_ranks(ranks, {{.kind = kind}, rule}, [&](ShardedMember& member) {
          for (const Samples& samples : four_steps()) member.step(samples);
          found[size_t(member.comm.rank())] = member.weights();
        });
        CHECK(errors == Errors(static_cast<size_t>(ranks)));
        CHECK(relative_error(found[0], expected) < kTolerance);
        for (const Values& other : found) CHECK((other == found[0]));  // bit by bit
      }
    }
  }
}

TEST_CASE("However far ahead units are fetched, they are whole when they are used",
          "[sharded][tsan]") {
  const Values expected = single_device_weights(four_steps(), kMomentum);
  for (const int prefetch : {0, 1, 5}) {
    for (const bool reshard : {true, false}) {
      INFO("prefetch " << prefetch << ", reshard " << reshard);
      Values found;
      const Setting setting{{.prefetch = prefetch, .reshard_after_forward = reshard}, kMomentum};
      const Errors errors = on_ranks(2, setting, [&](ShardedMember& member) {
        for (const Samples& samples : four_steps()) member.step(samples, 2);
        const Values weights = member.weights();
        if (member.comm.rank() == 0) found = weights;
      });
      CHECK(errors == Errors(2));
      CHECK(relative_error(found, expected) < kTolerance);
    }
  }
}

// --- Messages of 16 bits -------------------------------------------------------------------------

constexpr MessageTypes kBothBf16{.parameters = Compression::bf16, .gradients = Compression::bf16};

Values rounded(const Values& values) {
  Values all;
  for (const Real value : values) all.push_back(Real(float(Bf16(float(value)))));
  return all;
}

TEST_CASE("Gathered in bf16, parameters are rounded on all ranks alike, and shards are not",
          "[sharded][sixteen]") {
  const Setting setting{{.messages = {.parameters = Compression::bf16}}, kMomentum};
  std::vector<Values> gathered(3), kept(3);
  const Errors errors = on_ranks(3, setting, [&](ShardedMember& member) {
    member.step(Samples(6, 1));
    const size_t rank = size_t(member.comm.rank());
    for (Unit* unit : member.network.units()) {
      unit->gather();
      unit->await_values();
      const Values values = unit->values().to_host();
      gathered[rank].insert(gathered[rank].end(), values.begin(), values.end());
    }
    member.network.visit_units([&](Unit& unit) {  // as they are saved
      const Values values = unit.values().to_host();
      kept[rank].insert(kept[rank].end(), values.begin(), values.end());
    });
  });
  CHECK(errors == Errors(3));
  for (size_t rank = 0; rank < 3; ++rank) {
    CHECK((gathered[rank] == gathered[0]));
    CHECK((kept[rank] == kept[0]));
  }
  CHECK((gathered[0] == rounded(kept[0])));
  CHECK((gathered[0] != kept[0]));
}

/// What each rank has after four steps: the weights, and the bytes that it has sent.
struct Ended {
  Values weights;
  int64_t parameters = 0, gradients = 0;
};

std::vector<Ended> end_of(int ranks, const ShardingOptions& options) {
  std::vector<Ended> all(static_cast<size_t>(ranks));
  const Errors errors = on_ranks(ranks, {options, kMomentum}, [&](ShardedMember& member) {
    for (const Samples& samples : four_steps()) member.step(samples, 2);
    member.network.times(4);  // waits for the last step
    Ended& mine = all[size_t(member.comm.rank())];
    mine.parameters = member.comm.bytes_sent(Purpose::parameters);
    mine.gradients = member.comm.bytes_sent(Purpose::gradients);
    mine.weights = member.weights();
  });
  CHECK(errors == Errors(static_cast<size_t>(ranks)));
  return all;
}

TEST_CASE("With messages in bf16 ranks stay alike, near one device, with half of the bytes",
          "[sharded][sixteen][tsan]") {
  const Values expected = single_device_weights(four_steps(), kMomentum);
  for (const ShardKind kind : kShardKinds) {
    INFO("kind " << int(kind));
    const bool gathers = kind == ShardKind::parameters;
    const MessageTypes types{.parameters = gathers ? Compression::bf16 : Compression::none,
                             .gradients = Compression::bf16};
    const std::vector<Ended> whole = end_of(3, {.kind = kind});
    const std::vector<Ended> half = end_of(3, {.kind = kind, .messages = types});
    for (const Ended& rank : half) CHECK((rank.weights == half[0].weights));
    // Rounding moves a number by 2^-8 of it at most. The gradients move by 3 of these, and the
    // weights, which four steps change by a part of them, by less than one.
    const double error = relative_error(half[0].weights, expected);
    CHECK((error > 1e-6 && error < 0x1p-8));
    constexpr int64_t kBytes = sizeof(Real), kHalf = 2;
    CHECK(half[0].gradients * kBytes == whole[0].gradients * kHalf);
    CHECK(half[0].parameters * kBytes == whole[0].parameters * (gathers ? kHalf : kBytes));
  }
}

TEST_CASE("One rank that shares out with itself rounds nothing", "[sharded][sixteen]") {
  CHECK((end_of(1, {.messages = kBothBf16})[0].weights == end_of(1, {})[0].weights));
}

// --- What lies on a rank -------------------------------------------------------------------------

/// Bytes of one number each of all units' flat buffers.
int64_t padded_bytes(ShardedMember& member) {
  int64_t bytes = 0;
  for (const Unit* unit : member.network.units()) bytes += unit->length() * int64_t(sizeof(Real));
  return bytes;
}

TEST_CASE("Between steps a rank keeps what its kind says, and nothing else", "[sharded][memory]") {
  int64_t other = -1;  // than parameters, gradients and state: the loss; always the same
  for (const ShardKind kind : kShardKinds) {
    for (const int ranks : {1, 2, 4}) {
      INFO("kind " << int(kind) << ", " << ranks << " ranks");
      std::vector<int64_t> kept(static_cast<size_t>(ranks)), expected(kept);
      const Errors errors = on_ranks(ranks, {{.kind = kind}, kAdam}, [&](ShardedMember& member) {
        member.step(Samples(8));
        member.stream.synchronize();
        // A context's memory stays in its pool: not the units' business.
        member.context = Context(member.stream);
        const size_t rank = size_t(member.comm.rank());
        const int64_t whole = padded_bytes(member), shard = whole / ranks;
        // A library's workspace grows with the samples, on some processors and not on others.
        Device& device = member.device();
        kept[rank] = device.memory().current() - device.workspaces().current();
        expected[rank] = (kind >= ShardKind::parameters ? shard : whole) +
                         (kind >= ShardKind::gradients ? shard : whole) +
                         2 * (kind >= ShardKind::optimizer ? shard : whole);
      });
      CHECK(errors == Errors(static_cast<size_t>(ranks)));
      for (size_t rank = 0; rank < size_t(ranks); ++rank) {
        if (other < 0) other = kept[rank] - expected[rank];
        CHECK(std::abs(kept[rank] - expected[rank] - other) <= 64);
      }
    }
  }
}

TEST_CASE("Whole parameters are there while a unit is used, and given back after it",
          "[sharded][memory]") {
  const Errors errors = on_ranks(2, {{.prefetch = 1}, kMomentum}, [&](ShardedMember& member) {
    const auto units_with = [&](const auto& has) {
      int count = 0;
      for (const Unit* unit : member.network.units()) count += has(*unit->in_order().front());
      return count;
    };
    const auto value = [](const Parameter& p) { return p.value.defined(); };
    const auto gradient = [](const Parameter& p) { return p.grad.defined(); };
    require(units_with(value) == 0, "before the step");
    member.gradients(Samples(4));
    require(units_with(value) == 0 && units_with(gradient) == 0, "after backward");
    // Without a reduction whole gradients stay, parameters do not.
    member.context.facts.last_contribution = false;
    member.gradients(Samples(4), 2);
    require(units_with(value) == 0 && units_with(gradient) == 0, "after the last pass");
  });
  CHECK(errors == Errors(2));
}

TEST_CASE("Initialising and loading have one unit in full at a time", "[sharded][memory]") {
  std::vector<int64_t> most(2), shards(2), largest(2);
  const Errors errors = on_ranks(2, {}, [&](ShardedMember& member) {
    const size_t rank = size_t(member.comm.rank());
    member.device().memory().reset_peak();
    const int64_t before = member.device().memory().current();
    member.network.initialize(Initializer::normal, 7);
    member.network.load_units([&](Unit& unit) {  // as load_weights() does
      member.comm.broadcast(member.stream, unit.values(), 0);
    });
    most[rank] = member.device().memory().peak() - before;
    for (const Unit* unit : member.network.units()) {
      largest[rank] = std::max(largest[rank], unit->length() * int64_t(sizeof(Real)));
    }
  });
  CHECK(errors == Errors(2));
  CHECK(most == largest);
}

// --- What goes wrong -----------------------------------------------------------------------------

/// Passes on what it gets, but in the second backward, if it is to spoil that, back infinities for
/// the first feature: the layer before has a gradient that is not finite in one rank's shard.
class Spoils final : public Module {
 public:
  explicit Spoils(bool spoils) : spoils_(spoils) {}
  AnyTensor forward(const AnyTensor& x, Context&) override { return x; }
  AnyTensor backward(const AnyTensor& dy, Context& context) override {
    if (backwards_++ == 1 && spoils_) {
      const int64_t features = dy.shape().row_elements();
      for (int64_t first = 0; first < dy.elements(); first += features) {
        context.kernels().fill(context.stream(), std::numeric_limits<Real>::infinity(),
                               dy.range(first, {1}));
      }
    }
    return dy;
  }

 private:
  bool spoils_;
  int backwards_ = 0;
};

/// Two linear layers; between them the second step's gradients may be spoilt on rank 1.
MakeModule linear_network(bool spoils) {
  return [=](int rank) {
    auto network = std::make_unique<Sequential>();
    network->add("flatten", std::make_unique<Flatten>());
    network->add("fc1", std::make_unique<Linear>(256, 10));
    network->add("spoils", std::make_unique<Spoils>(spoils && rank == 1));
    network->add("fc2", std::make_unique<Linear>(10, 10));
    network->add("scores", std::make_unique<LogSoftmax>());
    network->set_name("");
    return network;
  };
}

/// x, and on rank 1, in its first pass, what a layer adds: if any pass of a rank gives that a
/// gradient, this one alone does.
class AddsOnRank1 final : public Module {
 public:
  explicit AddsOnRank1(bool adds)
      : adds_(adds), inner_(add_module("inner", std::make_unique<Linear>(10, 10))) {}
  AnyTensor forward(const AnyTensor& x, Context& context) override {
    if (!adds_) return x;
    const Tensor y = inner_.forward(x, context);
    context.kernels().add(context.stream(), x, y);
    return y;
  }
  AnyTensor backward(const AnyTensor& dy, Context& context) override {
    if (!std::exchange(adds_, false)) return dy;
    const Tensor dx = inner_.backward(dy, context);
    context.kernels().add(context.stream(), dy, dx);
    return dx;
  }

 private:
  bool adds_;
  Linear& inner_;
};

TEST_CASE("What one rank alone has used is updated on all, what none has used stays as it is",
          "[sharded]") {
  for (const bool used : {true, false}) {
    const MakeModule make = [=](int rank) {
      auto network = std::make_unique<Sequential>();
      network->add("flatten", std::make_unique<Flatten>());
      network->add("fc", std::make_unique<Linear>(256, 10));
      network->add("sometimes", std::make_unique<AddsOnRank1>(used && rank == 1));
      network->add("scores", std::make_unique<LogSoftmax>());
      network->set_name("");
      return network;
    };
    for (const ShardKind kind : kShardKinds) {
      INFO("kind " << int(kind) << ", used " << used);
      const Errors errors = on_ranks(2, {{.kind = kind}, kAdam, make}, [&](ShardedMember& member) {
        const Values before = member.weights();
        member.step(Samples(8), 2);  // micro-batches
        const Values after = member.weights();
        if (after.back() == before.back() && used) fail<BadInput>("its bias was not updated");
        if (after.back() != before.back() && !used) fail<BadInput>("its bias was updated");
        const std::vector<int64_t> steps = member.optimizer.steps();
        if (std::ranges::count(steps, 1) != (used ? 4 : 2)) fail<BadInput>("another step's count");
      });
      CHECK(errors == Errors(2));
    }
  }
}

TEST_CASE("What is not finite on one rank, its loss or a gradient alone, stops all",
          "[sharded][faults]") {
  const bool in_gradient = GENERATE(false, true);
  const MakeModule make = linear_network(in_gradient);
  const Values after_one = single_device_weights({Samples(6)}, kMomentum, make);
  for (const ShardKind kind : kShardKinds) {
    std::vector<int64_t> failed(3), own(3);
    std::vector<Values> weights(3);
    const Errors errors =
        on_ranks(3, {{.kind = kind}, kMomentum, make}, [&](ShardedMember& member) {
          const size_t rank = size_t(member.comm.rank());
          Samples samples(6);
          member.step(samples);
          // Rank 1's first sample.
          if (!in_gradient) samples.images[256] = std::numeric_limits<Real>::quiet_NaN();
          member.step(samples);
          failed[rank] = member.optimizer.health().to_host()[0].failed_step;
          own[rank] = member.network.own_health().to_host()[0].failed_step;
          weights[rank] = member.weights();
        });
    INFO("kind " << int(kind));
    CHECK(errors == Errors(3));
    CHECK(failed == std::vector<int64_t>{1, 1, 1});
    CHECK(own == std::vector<int64_t>{-1, 1, -1});
    for (const Values& kept : weights) CHECK(relative_error(kept, after_one) < kTolerance);
  }
}

TEST_CASE("Running statistics are rank 0's before every training forward", "[sharded]") {
  for (const bool broadcast : {true, false}) {
    std::vector<bool> far(2);
    const Setting setting{
        {.broadcast_buffers = broadcast}, kMomentum, small_network(ModelKind::seed_bn)};
    const Errors errors = on_ranks(2, setting, [&](ShardedMember& member) {
      member.step(Samples(8));
      const Tensor& statistics = member.network.running_statistics().values();
      if (member.comm.rank() == 1) member.stream.kernels().fill(member.stream, 1000, statistics);
      member.step(Samples(8));
      far[size_t(member.comm.rank())] = std::ranges::max(statistics.to_host()) > 100;
    });
    CHECK(errors == Errors(2));
    CHECK(far == std::vector<bool>{false, !broadcast});
  }
}

TEST_CASE("Ranks with different networks are told so, and a network that is no sequence",
          "[sharded][faults]") {
  const Setting different{
      {}, {}, [](int rank) {
        return small_network(rank == 0 ? ModelKind::seed : ModelKind::seed_bn)(rank);
      }};
  for (const std::string& error : on_ranks(2, different, [](ShardedMember&) {})) {
    CHECK_THAT(error, ContainsSubstring("all ranks must build the same network"));
  }
  const Setting alone{{}, {}, [](int) { return std::make_unique<Relu>(); }};
  CHECK_THAT(on_ranks(1, alone, [](ShardedMember&) {})[0], ContainsSubstring("is no Sequential"));
}

}  // namespace
}  // namespace lockstep
