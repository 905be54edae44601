// Single layers that are split over ranks, and those that cannot be.

#include "03-model-split/tensor/tensor_split.h"

#include "03-model-split/tensor/row_and_column.h"
#include "common/core/stream_backend.h"
#include "common/nn/init.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/machine.h"
#include "tests/support/nn_test_support.h"
#include "tests/unit/03/tensor_split_runs.h"

namespace lockstep {
namespace {

using namespace testing::tensor_split;
using Catch::Matchers::ContainsSubstring;
using testing::cpus;
using testing::kTolerance;
using testing::message_of;
using testing::random_values;
using testing::relative_error;
using Values = std::vector<Real>;
using Names = std::vector<std::string>;

// --- One layer -----------------------------------------------------------------------------------

/// How a layer is split: axes of input, output, and parameters in memory.
struct Axes {
  int x, y;
  std::vector<int> parameters;
};

/// The unsplit layer and its results.
template <class Whole>
struct Expected {
  Expected(std::unique_ptr<Whole> whole, const Shape& x_shape)
      : layer(std::move(whole)), x_shape(x_shape) {
    layer->set_name("layer");
    parameters = std::make_unique<FlatParameters>(*layer, machine.streams[0]);
    initialize(*parameters, Initializer::kaiming_uniform, 3);
    x_values = random_values(x_shape, 1);
    const Tensor y = layer->forward(machine.put(x_shape, x_values)[0], *machine.contexts[0]);
    y_shape = y.shape();
    y_values = y.to_host();
    scores_gradients = random_values(y_shape, 2);
    dx = layer->backward(machine.put(y_shape, scores_gradients)[0], *machine.contexts[0]).to_host();
  }

  SplitMachine machine{cpus(1)};
  std::unique_ptr<Whole> layer;
  std::unique_ptr<FlatParameters> parameters;
  Shape x_shape, y_shape;
  Values x_values, y_values, scores_gradients, dx;
};

/// The split layer has the unsplit one's output, and gradients of input, weights and biases. It
/// makes one all-reduce, of so many numbers.
template <class Split, class Whole>
void check_layer(std::unique_ptr<Whole> whole, const Shape& x_shape, const Axes& axes,
                 int64_t summed) {
  const Expected<Whole> expected(std::move(whole), x_shape);
  for (const std::string& devices : {cpus(1), cpus(2), cpus(4), std::string("cpu:0,cpu:0")}) {
    for (const int late : {-1, 0, 1}) {
      SplitMachine machine(devices, late < std::ssize(parse_devices(devices)) ? late : -1);
      INFO(devices << ", late: " << machine.late);
      const RankModules modules(*machine.world);
      Split split(*expected.layer, modules);
      const Shards shards(machine, modules, *expected.parameters, axes.parameters);
      const Tensors x = machine.put(x_shape, expected.x_values, axes.x);
      const Tensors dy = machine.put(expected.y_shape, expected.scores_gradients, axes.y);
      machine.delay();
      const Tensors y = split.forward(x, machine.contexts);
      machine.delay();
      const Tensors dx = split.backward(dy, machine.contexts);
      check_parts(y, expected.y_values, expected.y_shape, axes.y);
      check_parts(dx, expected.dx, x_shape, axes.x);
      shards.check_gradients();
      const Traffic traffic{.all_reduces = machine.ranks() == 1 ? 0 : 1,
                            .bytes = sent_for_sum(summed, machine.ranks()) * kReal};
      CHECK(split.traffic() == traffic);
      CHECK(split.predicted(x[0].shape()) == split.traffic());
    }
  }
}

std::unique_ptr<Linear> linear(Activation activation) {
  return std::make_unique<Linear>(24, 16, activation);
}

std::unique_ptr<Conv2d> convolution() {
  return std::make_unique<Conv2d>(8, 12, Conv2d::Options{.kernel = 3, .stride = 2, .padding = 1});
}

TEST_CASE("A linear layer split by its outputs is that layer", "[tensorsplit][tsan][row52]") {
  const Axes axes{.x = kWhole, .y = 1, .parameters = {0, 0}};
  check_layer<ColumnLinear>(linear(Activation::none), {7, 24}, axes, 7 * 24);
  check_layer<ColumnLinear>(linear(Activation::relu), {7, 24}, axes, 7 * 24);
}

TEST_CASE("A linear layer split by its inputs is that layer, bias and ReLU once",
          "[tensorsplit][tsan][row52][row54]") {
  const Axes axes{.x = 1, .y = kWhole, .parameters = {1, kWhole}};
  check_layer<RowLinear>(linear(Activation::none), {7, 24}, axes, 7 * 16);
  check_layer<RowLinear>(linear(Activation::relu), {7, 24}, axes, 7 * 16);
}

TEST_CASE("A convolution split by output channels is that convolution",
          "[tensorsplit][tsan][row53]") {
  check_layer<ColumnConv2d>(convolution(), {3, 6, 7, 8},
                            {.x = kWhole, .y = 3, .parameters = {0, 0}}, 3 * 6 * 7 * 8);
}

TEST_CASE("A convolution split by input channels is that convolution, bias once",
          "[tensorsplit][tsan][row53][row54]") {
  check_layer<RowConv2d>(convolution(), {3, 6, 7, 8},
                         {.x = 3, .y = kWhole, .parameters = {3, kWhole}}, 3 * 3 * 4 * 12);
}

TEST_CASE("Split activations become whole and whole ones split, both ways",
          "[tensorsplit][tsan][row53]") {
  for (const Shape& shape : {Shape{3, 2, 5, 12}, Shape{4, 24}, Shape{1, 1, 1, 12}}) {
    for (const int ranks : {1, 2, 3, 4}) {
      INFO(shape.text() << " over " << ranks);
      SplitMachine machine(cpus(ranks), ranks - 1);
      const RankModules modules(*machine.world);
      JoinChannels join("join", modules);
      TakeChannels take("take", modules);
      const Values values = random_values(shape, 5);
      const int last = shape.rank() - 1;
      const Tensors whole = machine.put(shape, values), split = machine.put(shape, values, last);
      machine.delay();
      const auto check = [&](const Tensors& found, int axis) {
        for (int r = 0; r < ranks; ++r) {
          CHECK((found[r].to_host() == part(values, shape, axis, ranks, r)));
        }
      };
      check(join.forward(split, machine.contexts), kWhole);
      check(take.forward(whole, machine.contexts), last);
      const Traffic traffic{.all_gathers = ranks > 1 ? 1 : 0,
                            .bytes = sent_for_gather(shape.elements(), ranks) * kReal};
      CHECK(join.traffic() == traffic);
      CHECK(join.predicted(split[0].shape()) == traffic);
      CHECK(take.traffic() == Traffic());
      check(join.backward(whole, machine.contexts), last);
      check(take.backward(split, machine.contexts), kWhole);
      CHECK(join.traffic() == traffic);
      CHECK(take.traffic() == traffic);
      CHECK(take.predicted(shape) == traffic);
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
    SplitMachine machine(cpus(ranks), 1, {.trace = true});
    const RankModules modules(*machine.world);
    ColumnLinear column(whole(0), modules);
    RowLinear row(whole(1), modules);
    const Shards shards(machine, modules, *expected.parameters, {0, 0, 1, kWhole});
    machine.delay();
    const Tensors between =
        column.forward(machine.put(x_shape, expected.x_values), machine.contexts);
    const Tensors y = row.forward(between, machine.contexts);
    machine.delay();
    const Tensors dbetween =
        row.backward(machine.put(y_shape, expected.scores_gradients), machine.contexts);
    check_parts(y, expected.y_values, y_shape, kWhole);
    check_parts(column.backward(dbetween, machine.contexts), expected.dx, x_shape, kWhole);
    shards.check_gradients();
    CHECK(row.traffic() == Traffic{.all_reduces = 1, .bytes = sent_for_sum(5 * 6, ranks) * kReal});
    CHECK(column.traffic() ==
          Traffic{.all_reduces = 1, .bytes = sent_for_sum(5 * 10, ranks) * kReal});
    for (const Stream& stream : machine.streams) {
      Names summed;  // one operation of a rank per all-reduce
      for (const Span& span : stream.backend().timeline()) {
        if (std::string(span.op) == "sum_ranks") summed.push_back(*span.scope);
      }
      CHECK(summed == Names{"layer.second", "layer.first"});
    }
  }
}

TEST_CASE("A bias added by every rank is P - 1 biases too many", "[tensorsplit][row54]") {
  // As if RowLinear added up the ranks' complete layers: the comparison above would see it.
  const Expected<Linear> expected(linear(Activation::none), {7, 24});
  constexpr int kRanks = 4;
  Values wrong(expected.y_values.size());
  for (int r = 0; r < kRanks; ++r) {
    Linear shard(24 / kRanks, 16);
    const FlatParameters parameters(shard, expected.machine.streams[0]);
    Shards::load_part(parameters, *expected.parameters, kRanks, r, {1, kWhole});
    const Tensor x = Tensor::from_host(expected.machine.streams[0], {7, 24 / kRanks},
                                       part(expected.x_values, {7, 24}, 1, kRanks, r));
    const Values y = shard.forward(x, *expected.machine.contexts[0]).to_host();
    for (size_t i = 0; i < y.size(); ++i) wrong[i] += y[i];
  }
  CHECK(relative_error(wrong, expected.y_values) > 1e-2);
  const Values bias = expected.parameters->parameters()[1]->value.to_host();
  for (size_t i = 0; i < wrong.size(); ++i) wrong[i] -= (kRanks - 1) * bias[i % 16];
  CHECK(relative_error(wrong, expected.y_values) <= kTolerance);
}

// --- Refusals ------------------------------------------------------------------------------------

TEST_CASE("Features that do not divide are refused with the numbers", "[tensorsplit][row55]") {
  SplitMachine machine(cpus(3));
  const RankModules modules(*machine.world);
  const auto check = [](const std::string& text, const std::string& expected) {
    CHECK_THAT(text, ContainsSubstring(expected));
    CHECK(text.find('\n') == text.npos);
  };
  auto wide = linear(Activation::none);  // 24 to 16
  wide->set_name("wide");
  Linear narrow(16, 24);
  narrow.set_name("narrow");
  auto conv = convolution();  // 8 to 12
  conv->set_name("conv");
  Conv2d to_eight(12, 8, {});
  to_eight.set_name("to_eight");
  check(message_of<BadInput>([&] { ColumnLinear(*wide, modules); }),
        "wide: 16 output features cannot be split evenly over 3 ranks");
  check(message_of<BadInput>([&] { RowLinear(narrow, modules); }),
        "narrow: 16 input features cannot be split evenly over 3 ranks");
  check(message_of<BadInput>([&] { ColumnConv2d(to_eight, modules); }),
        "to_eight: 8 output channels cannot be split evenly over 3 ranks");
  check(message_of<BadInput>([&] { RowConv2d(*conv, modules); }),
        "conv: 8 input channels cannot be split evenly over 3 ranks");
  TakeChannels take("take", modules);
  const auto flat = machine.put({2, 16}, Values(32, 1));
  check(message_of<BadInput>([&] { take.forward(flat, machine.contexts); }),
        "take: 16 channels cannot be split evenly over 3 ranks");
}

TEST_CASE("A split by name that does not divide is refused", "[tensorsplit][row55]") {
  SplitMachine machine(cpus(3));
  const auto check = [&](const ModelOptions& options, const Names& layers,
                         const std::string& expected) {
    const std::string text = message_of<BadInput>(
        [&] { TensorSplit(options, machine.streams, *machine.world, layers); });
    CHECK_THAT(text, ContainsSubstring(expected));
    CHECK(text.find('\n') == text.npos);
  };
  check(seed_options(), {"conv2", "fc1"},
        "conv2: 20 output channels cannot be split evenly over 3 ranks");
  check(seed_options(), {"fc1"}, "fc1: 320 input features cannot be split evenly over 3 ranks");
  check(resnet_options(4), {"block2.1"},
        "block2.1.conv1: 8 output channels cannot be split evenly over 3 ranks");
}

TEST_CASE("Layers that cannot be split are refused with those that can", "[tensorsplit][row55]") {
  SplitMachine machine(cpus(2));
  const auto split = [&](const ModelOptions& options, const Names& layers) {
    return message_of<BadInput>(
        [&] { TensorSplit(options, machine.streams, *machine.world, layers); });
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

TEST_CASE("A rank's wrong input names the rank, its device and the layer", "[tensorsplit]") {
  Network network(seed_options(), cpus(2));
  Tensors images = network.machine.put({2, 28, 28, 1}, Values(2 * 28 * 28, 1));
  images[1] = Tensor::empty(network.machine.streams[1], {2, 28, 28, 3});
  const std::string text = message_of<BadInput>([&] { network.forward(images); });
  CHECK_THAT(text, ContainsSubstring("rank 1 on cpu:1: conv1"));
  CHECK(text.find('\n') == text.npos);
  images.pop_back();
  CHECK_THAT(message_of<BadInput>([&] { network.forward(images); }),
             ContainsSubstring("1 tensors and 2 contexts for 2 ranks"));
  std::swap(network.machine.contexts[0], network.machine.contexts[1]);
  CHECK_THAT(message_of<BadInput>([&] {
               network.forward(network.machine.put({2, 28, 28, 1}, Values(2 * 28 * 28, 1)));
             }),
             ContainsSubstring("rank 0 works on stream compute of cpu:0") &&
                 ContainsSubstring("compute of cpu:1"));
  CHECK_THAT(message_of<BadInput>([&] {
               TensorSplit(seed_options(), {network.machine.streams[0]}, *network.machine.world);
             }),
             ContainsSubstring("1 streams for a world of 2 ranks"));
}

}  // namespace
}  // namespace lockstep
