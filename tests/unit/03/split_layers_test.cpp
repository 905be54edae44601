// Single layers that are split over ranks, and those that cannot be.

#include <set>

#include "03-model-split/tensor/row_and_column.h"
#include "tests/support/data_test_files.h"
#include "tests/support/process.h"
#include "tests/support/tcp_stores.h"
#include "tests/unit/03/tensor_split_runs.h"

namespace lockstep {
namespace {

using namespace testing::tensor_split;
using Catch::Matchers::ContainsSubstring;
using testing::kTolerance;
using testing::message_of;
using testing::random_values;
using testing::Ranks;
using testing::relative_error;

// --- One layer -----------------------------------------------------------------------------------

/// How a layer is split: axes of input, output, and parameters in memory.
struct Axes {
  int x, y;
  std::vector<int> parameters;
};

/// What a layer makes of an input, and of the gradient of its output.
struct LayerPasses {
  Values y, dx;
  std::vector<Values> gradients;  // of the parameters
  Traffic traffic;
  int64_t sent = 0;  // bytes of activations, as counted
};

LayerPasses run(Module& layer, const FlatParameters& parameters, Member& member, const Tensor& x,
                const Tensor& dy) {
  LayerPasses passes;
  member.delay();
  const Tensor y = layer.forward(x, member.context);
  member.delay();
  const Tensor dx = layer.backward(dy, member.context);
  passes.y = y.to_host();
  passes.dx = dx.to_host();
  for (const Parameter* p : parameters.parameters()) passes.gradients.push_back(p->grad.to_host());
  for (const auto& [name, traffic] : member.shared.traffic()) passes.traffic = traffic;
  passes.sent = member.shared.comm().bytes_sent(Purpose::activations);
  return passes;
}

/// The unsplit layer, and what it makes of these numbers.
template <class Whole>
struct Expected {
  Expected(std::unique_ptr<Whole> whole, const Shape& x_shape)
      : layer(std::move(whole)), x_shape(x_shape), x(random_values(x_shape, 1)) {
    layer->set_name("layer");
    flat = std::make_unique<FlatParameters>(*layer, device.stream);
    initialize(*flat, Initializer::kaiming_uniform, 3);
    Context context(device.stream);
    const Tensor y = layer->forward(device.put(x_shape, x), context);
    y_shape = y.shape();
    dy = random_values(y_shape, 2);
    passes.dx = layer->backward(device.put(y_shape, dy), context).to_host();
    passes.y = y.to_host();
    for (const Parameter* p : flat->parameters()) {
      shapes.push_back(p->shape);
      parameters.push_back(p->value.to_host());
      passes.gradients.push_back(p->grad.to_host());
    }
  }

  /// A rank's parameters become its parts of the layer's.
  void load(const FlatParameters& mine, const Member& member, const std::vector<int>& axes) const {
    for (size_t i = 0; i < axes.size(); ++i) {
      mine.parameters()[i]->value.copy_from_host(
          part(parameters[i], shapes[i], axes[i], member.ranks(), member.rank()));
    }
  }
  /// Each rank has its part of the passes.
  void check(const std::vector<LayerPasses>& found, const Axes& axes) const {
    check_parts(each(found, &LayerPasses::y), passes.y, y_shape, axes.y);
    check_parts(each(found, &LayerPasses::dx), passes.dx, x_shape, axes.x);
    for (size_t i = 0; i < axes.parameters.size(); ++i) {
      INFO("parameter " << i);
      std::vector<Values> gradients;
      for (const LayerPasses& of_rank : found) gradients.push_back(of_rank.gradients[i]);
      check_parts(gradients, passes.gradients[i], shapes[i], axes.parameters[i]);
    }
  }

  testing::TestDevice device;
  std::unique_ptr<Whole> layer;
  std::unique_ptr<FlatParameters> flat;
  Shape x_shape, y_shape;
  Values x, dy;
  std::vector<Shape> shapes;  // of the parameters
  std::vector<Values> parameters;
  LayerPasses passes;
};

/// The split layer has the unsplit one's output, and gradients of input, weights and biases. It
/// makes one all-reduce, of so many numbers.
template <class Split, class Whole>
void check_layer(std::unique_ptr<Whole> whole, const Shape& x_shape, const Axes& axes,
                 int64_t summed) {
  const Expected<Whole> expected(std::move(whole), x_shape);
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int late : {-1, 0, 1}) {
      if (late >= ranks) continue;
      INFO(ranks << " ranks, late: " << late);
      const auto passes = [&](Member& member) {
        Split split(*expected.layer, member.shared);
        split.set_name("layer");
        const FlatParameters mine(split, member.stream);
        expected.load(mine, member, axes.parameters);
        return run(split, mine, member, member.put(x_shape, expected.x, axes.x),
                   member.put(expected.y_shape, expected.dy, axes.y));
      };
      // Over TCP a sum of any size goes round a ring, in shared memory such small ones do not.
      const std::vector<LayerPasses> found =
          on_ranks(late < 0 ? testing::tcp_ranks(ranks) : testing::shm_ranks(ranks), passes, late);
      expected.check(found, axes);
      for (const LayerPasses& of_rank : found) {
        CHECK(of_rank.traffic.all_reduces == (ranks == 1 ? 0 : 1));
        CHECK(of_rank.traffic.all_gathers == 0);
        CHECK(of_rank.traffic.bytes == Approx(sent_for_sum(summed, ranks, late >= 0)));
        CHECK(double(of_rank.sent) == Approx(of_rank.traffic.bytes));
      }
    }
  }
}

std::unique_ptr<Linear> linear(Activation activation) {
  return std::make_unique<Linear>(24, 12, activation);
}

std::unique_ptr<Conv2d> convolution() {
  return std::make_unique<Conv2d>(12, 24, Conv2d::Options{.kernel = 3, .stride = 2, .padding = 1});
}

TEST_CASE("A linear layer split by its outputs is that layer", "[tensorsplit][tsan][row52]") {
  const Axes axes{.x = kWhole, .y = 1, .parameters = {0, 0}};
  check_layer<ColumnLinear>(linear(Activation::none), {7, 24}, axes, 7 * 24);
  check_layer<ColumnLinear>(linear(Activation::relu), {7, 24}, axes, 7 * 24);
}

TEST_CASE("A linear layer split by its inputs is that layer, bias and ReLU once",
          "[tensorsplit][tsan][row52][row54]") {
  const Axes axes{.x = 1, .y = kWhole, .parameters = {1, kWhole}};
  check_layer<RowLinear>(linear(Activation::none), {7, 24}, axes, 7 * 12);
  check_layer<RowLinear>(linear(Activation::relu), {7, 24}, axes, 7 * 12);
}

TEST_CASE("A convolution split by output channels is that convolution",
          "[tensorsplit][tsan][row53]") {
  check_layer<ColumnConv2d>(convolution(), {3, 6, 7, 12},
                            {.x = kWhole, .y = 3, .parameters = {0, 0}}, 3 * 6 * 7 * 12);
}

TEST_CASE("A convolution split by input channels is that convolution, bias once",
          "[tensorsplit][tsan][row53][row54]") {
  check_layer<RowConv2d>(convolution(), {3, 6, 7, 12},
                         {.x = 3, .y = kWhole, .parameters = {3, kWhole}}, 3 * 3 * 4 * 24);
}

TEST_CASE("Split activations become whole and whole ones split, both ways",
          "[tensorsplit][tsan][row53]") {
  struct Ways {
    Values joined, taken, join_back, take_back;
    std::map<std::string, Traffic> after_forward, after_backward;
  };
  for (const Shape& shape : {Shape{3, 2, 5, 12}, Shape{4, 24}, Shape{1, 1, 1, 12}}) {
    for (const int ranks : {1, 2, 3, 4}) {
      INFO(shape.text() << " over " << ranks);
      const Values values = random_values(shape, 5);
      const int last = shape.axes() - 1;
      const auto found = on_ranks(
          ranks,
          [&](Member& member) {
            JoinChannels join(member.shared);
            join.set_name("join");
            TakeChannels take(member.shared);
            take.set_name("take");
            const Tensor whole = member.put(shape, values), split = member.put(shape, values, last);
            Context& context = member.context;
            member.delay();
            Ways ways;
            ways.joined = join.forward(split, context).to_host();
            ways.taken = take.forward(whole, context).to_host();
            ways.after_forward = member.shared.traffic();
            ways.join_back = join.backward(whole, context).to_host();
            ways.take_back = take.backward(split, context).to_host();
            ways.after_backward = member.shared.traffic();
            return ways;
          },
          ranks - 1);
      for (int r = 0; r < ranks; ++r) {
        const Values mine = part(values, shape, last, ranks, r);
        CHECK((found[size_t(r)].joined == values));
        CHECK((found[size_t(r)].taken == mine));
        CHECK((found[size_t(r)].join_back == mine));
        CHECK((found[size_t(r)].take_back == values));
      }
      if (ranks == 1) continue;
      const double bytes = sent_for_gather(shape.elements(), ranks);
      Ways first = found[0];
      CHECK(first.after_forward.size() == 1);
      CHECK(first.after_forward["join"].all_gathers == 1);
      CHECK(first.after_forward["join"].bytes == Approx(bytes));
      CHECK(first.after_backward["join"].bytes == Approx(bytes));
      CHECK(first.after_backward["take"].all_gathers == 1);
      CHECK(first.after_backward["take"].bytes == Approx(bytes));
    }
  }
}

TEST_CASE("Column, ReLU, row need one all-reduce forward and one backward",
          "[tensorsplit][tsan][row52][row56]") {
  // The outputs of the first layer, split, are the inputs of the second.
  auto both = std::make_unique<Sequential>();
  both->add("first", std::make_unique<Linear>(10, 24, Activation::relu));
  both->add("second", std::make_unique<Linear>(24, 6));
  const Shape x_shape{5, 10}, y_shape{5, 6};
  const Expected<Sequential> expected(std::move(both), x_shape);
  const auto whole = [&](size_t i) -> const Linear& {
    return dynamic_cast<const Linear&>(*expected.layer->children()[i]);
  };
  for (const int ranks : {2, 4}) {
    std::map<std::string, Traffic> traffic;
    const auto found = on_ranks(
        testing::tcp_ranks(ranks),
        [&](Member& member) {
          Sequential pair;
          pair.add("first", std::make_unique<ColumnLinear>(whole(0), member.shared));
          pair.add("second", std::make_unique<RowLinear>(whole(1), member.shared));
          pair.set_name("layer");
          const FlatParameters mine(pair, member.stream);
          expected.load(mine, member, {0, 0, 1, kWhole});
          const LayerPasses passes = run(pair, mine, member, member.put(x_shape, expected.x),
                                         member.put(y_shape, expected.dy));
          if (member.rank() == 0) traffic = member.shared.traffic();
          return passes;
        },
        1);
    expected.check(found, {.x = kWhole, .y = kWhole, .parameters = {0, 0, 1, kWhole}});
    CHECK(traffic.size() == 2);
    CHECK(traffic["layer.second"].all_reduces == 1);
    CHECK(traffic["layer.second"].bytes == Approx(sent_for_sum(5 * 6, ranks)));
    CHECK(traffic["layer.first"].all_reduces == 1);
    CHECK(traffic["layer.first"].bytes == Approx(sent_for_sum(5 * 10, ranks)));
    int64_t sent = 0;
    for (const LayerPasses& of_rank : found) sent += of_rank.sent;
    CHECK(double(sent) == Approx(ranks * sent_for_sum(5 * 6 + 5 * 10, ranks)));
  }
}

TEST_CASE("A bias added by every rank is P - 1 biases too many", "[tensorsplit][row54]") {
  // As if RowLinear added up the ranks' complete layers: the comparison above would see it.
  const Expected<Linear> expected(linear(Activation::none), {7, 24});
  constexpr int kRanks = 4;
  const auto found = on_ranks(kRanks, [&](Member& member) {
    Linear share(24 / kRanks, 12);
    const FlatParameters mine(share, member.stream);
    expected.load(mine, member, {1, kWhole});
    return share.forward(member.put({7, 24}, expected.x, 1), member.context).to_host();
  });
  Values wrong(expected.passes.y.size());
  for (const Values& y : found) {
    for (size_t i = 0; i < y.size(); ++i) wrong[i] += y[i];
  }
  CHECK(relative_error(wrong, expected.passes.y) > 1e-2);
  for (size_t i = 0; i < wrong.size(); ++i) {
    wrong[i] -= (kRanks - 1) * expected.parameters[1][i % 12];
  }
  CHECK(relative_error(wrong, expected.passes.y) <= kTolerance);
}

TEST_CASE("A gradient that only one rank has is found by all to be not finite", "[tensorsplit]") {
  for (const int sick : {-1, 1}) {
    const auto found = on_ranks(3, [&](Member& member) {
      const int64_t step = member.rank() == sick ? 7 : -1;
      const HealthTensor mine = HealthTensor::from_host(member.stream, {}, {Health{step}});
      std::vector<int64_t> failed;
      for (const HealthTensor& health : member.shared.healths(mine, member.context)) {
        failed.push_back(health.to_host()[0].failed_step);
      }
      return failed;
    });
    for (const auto& failed : found)
      CHECK(failed == std::vector<int64_t>{-1, sick < 0 ? -1 : 7, -1});
  }
}

// --- Planted faults ------------------------------------------------------------------------------

#if defined(__SANITIZE_THREAD__)
testing::ProcessResult deaf_streams(const char* deaf, const char* pace) {
  return testing::run_process({testing::build_dir() + "/tests/unit/deaf-streams", deaf, pace}, 60);
}

TEST_CASE(
    "ThreadSanitizer reports a wait that is missing in either direction, however late the host",
    "[tensorsplit][tsan]") {
  for (const char* deaf : {"compute", "communication"}) {
    for (const char* pace : {"fast", "late"}) {
      for (int i = 0; i < 3; ++i) {
        const testing::ProcessResult result = deaf_streams(deaf, pace);
        INFO(deaf << " is deaf, " << pace << " host, run " << i << "\n" << result.err);
        CHECK(result.status > 0);
        // It has another word for the race of a reader with the memory's end.
        CHECK_THAT(result.err, ContainsSubstring("ThreadSanitizer: data race") ||
                                   ContainsSubstring("ThreadSanitizer: heap-use-after-free"));
      }
    }
  }
}

TEST_CASE("ThreadSanitizer is silent where layers and their sums wait for each other",
          "[tensorsplit][tsan]") {
  for (const char* pace : {"fast", "late"}) {
    const testing::ProcessResult result = deaf_streams("none", pace);
    INFO(pace << " host");
    CHECK(result.status == 0);
    CHECK(result.err == "");
  }
}
#endif

// --- Refusals ------------------------------------------------------------------------------------

/// The error of making something on one of so many ranks.
template <class Make>
std::string refusal(int ranks, Make make) {
  const auto messages = on_ranks(
      ranks, [&](Member& member) { return message_of<BadInput>([&] { make(member.shared); }); });
  CHECK(messages[0].find('\n') == std::string::npos);
  CHECK(std::set<std::string>(messages.begin(), messages.end()).size() == 1);
  return messages[0];
}

TEST_CASE("Features that do not divide are refused with the numbers", "[tensorsplit][row55]") {
  const auto whole = [](auto layer, const char* name) {
    layer->set_name(name);
    return layer;
  };
  const auto wide = whole(std::make_unique<Linear>(24, 16), "wide");
  const auto narrow = whole(std::make_unique<Linear>(16, 24), "narrow");
  const auto conv = whole(std::make_unique<Conv2d>(8, 12, Conv2d::Options{}), "conv");
  const auto to_eight = whole(std::make_unique<Conv2d>(12, 8, Conv2d::Options{}), "to_eight");
  CHECK_THAT(refusal(3, [&](SplitRanks& ranks) { ColumnLinear(*wide, ranks); }),
             ContainsSubstring("wide: 16 output features cannot be split evenly over 3 ranks"));
  CHECK_THAT(refusal(3, [&](SplitRanks& ranks) { RowLinear(*narrow, ranks); }),
             ContainsSubstring("narrow: 16 input features cannot be split evenly over 3 ranks"));
  CHECK_THAT(refusal(3, [&](SplitRanks& ranks) { ColumnConv2d(*to_eight, ranks); }),
             ContainsSubstring("to_eight: 8 output channels cannot be split evenly over 3 ranks"));
  CHECK_THAT(refusal(3, [&](SplitRanks& ranks) { RowConv2d(*conv, ranks); }),
             ContainsSubstring("conv: 8 input channels cannot be split evenly over 3 ranks"));
  const auto messages = on_ranks(3, [](Member& member) {
    TakeChannels take(member.shared);
    take.set_name("take");
    const Tensor flat = member.put({2, 16}, Values(32, 1));
    return message_of<BadInput>([&] { take.forward(flat, member.context); });
  });
  CHECK_THAT(messages[2], ContainsSubstring("take: 16 channels cannot be split evenly over 3"));
}

TEST_CASE("A split by name that does not divide is refused", "[tensorsplit][row55]") {
  const auto split = [](const ModelOptions& options, const Names& layers) {
    return refusal(3, [&](SplitRanks& ranks) { TensorSplit(options, ranks, layers); });
  };
  CHECK_THAT(split(seed_options(), {"conv2", "fc1"}),
             ContainsSubstring("conv2: 20 output channels cannot be split evenly over 3 ranks"));
  CHECK_THAT(split(seed_options(), {"fc1"}),
             ContainsSubstring("fc1: 320 input features cannot be split evenly over 3 ranks"));
  CHECK_THAT(split(resnet_options(4), {"block2.1"}),
             ContainsSubstring("block2.1.conv1: 8 output channels cannot be split evenly"));
}

TEST_CASE("Ranks by which no layer divides are refused with the widths", "[tensorsplit][row55]") {
  const auto split = [](const ModelOptions& options) {
    return refusal(3, [&](SplitRanks& ranks) { TensorSplit(options, ranks); });
  };
  CHECK_THAT(split(seed_options()),
             ContainsSubstring("no layer of this network divides by 3 ranks (conv2 has 20, "
                               "fc1 has 320); use a number that divides one of them"));
  CHECK_THAT(split(resnet_options(4)), ContainsSubstring("(block1.0 has 4, block1.1 has 4, "));
  CHECK_THAT(
      split({.kind = ModelKind::mlp, .width = 6, .depth = 1}),
      ContainsSubstring("this network has no layer that can be split over 3 ranks; use one rank"));
}

TEST_CASE("Layers that cannot be split are refused with those that can", "[tensorsplit][row55]") {
  const auto split = [](const ModelOptions& options, const Names& layers) {
    return refusal(2, [&](SplitRanks& ranks) { TensorSplit(options, ranks, layers); });
  };
  for (const std::string name : {"conv3", "conv1", "", "fc2"}) {
    CHECK_THAT(split(seed_options(), {"fc1", name}),
               ContainsSubstring("'" + name +
                                 "' cannot be split in this network; choose from "
                                 "conv2, fc1"));
  }
  CHECK_THAT(split(resnet_options(), {"conv2"}),
             ContainsSubstring("'conv2'") && ContainsSubstring("block1.0, block1.1, block2.0"));
}

}  // namespace
}  // namespace lockstep
