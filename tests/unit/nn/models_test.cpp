// The models and their numbers: PyTorch's names and shapes, flat buffers, states, initial values.

#include <iterator>
#include <map>
#include <sstream>

#include "common/core/error.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "common/nn/state_dict.h"
#include "tests/support/catch.h"
#include "tests/support/nn_test_support.h"
#include "tests/unit/nn/test_network.h"

namespace lockstep {
namespace {

using namespace testing::nn;
using Catch::Matchers::ContainsSubstring;
using testing::kDouble;
using testing::random_values;
using testing::relative_error;
using Values = std::vector<Real>;
using Names = std::vector<std::string>;

// --- Names and shapes ----------------------------------------------------------------------------

// "layer OxIxHxW" of every layer in PyTorch's order: its weight has that shape and its bias the
// first extent of it. One extent alone is a batch normalisation, with running statistics.
const char* const kSeedLayers = "conv1 10x1x5x5 conv2 20x10x5x5 fc1 50x320 fc2 10x50";
const char* const kSeedBnLayers =
    "conv1 10x1x5x5 bn1 10 conv2 20x10x5x5 bn2 20 fc1 50x320 fc2 10x50";
const char* const kResNetWidth8Layers =
    "stem_conv 8x1x3x3 stem_bn 8 block1.0.conv1 8x8x3x3 block1.0.conv2 8x8x3x3 "
    "block1.0.bn1 8 block1.0.bn2 8 block1.1.conv1 8x8x3x3 block1.1.conv2 8x8x3x3 "
    "block1.1.bn1 8 block1.1.bn2 8 block2.0.conv1 16x8x3x3 block2.0.conv2 16x16x3x3 "
    "block2.0.conv3 16x8x1x1 block2.0.bn1 16 block2.0.bn2 16 block2.1.conv1 16x16x3x3 "
    "block2.1.conv2 16x16x3x3 block2.1.bn1 16 block2.1.bn2 16 block3.0.conv1 32x16x3x3 "
    "block3.0.conv2 32x32x3x3 block3.0.conv3 32x16x1x1 block3.0.bn1 32 block3.0.bn2 32 "
    "block3.1.conv1 32x32x3x3 block3.1.conv2 32x32x3x3 block3.1.bn1 32 block3.1.bn2 32 "
    "block4.0.conv1 64x32x3x3 block4.0.conv2 64x64x3x3 block4.0.conv3 64x32x1x1 "
    "block4.0.bn1 64 block4.0.bn2 64 block4.1.conv1 64x64x3x3 block4.1.conv2 64x64x3x3 "
    "block4.1.bn1 64 block4.1.bn2 64 fc 10x64";

struct Expected {
  Names parameters, buffers;  // "conv1.weight [10, 1, 5, 5]"
};

Expected expected_tensors(const std::string& layers) {
  Expected expected;
  std::istringstream in(layers);
  for (std::string name, extents; in >> name >> extents;) {
    std::ranges::replace(extents, 'x', ' ');
    std::istringstream numbers(extents);
    const std::vector<int64_t> weight{std::istream_iterator<int64_t>(numbers), {}};
    const Shape shape(weight), first{weight[0]};
    expected.parameters.push_back(name + ".weight " + shape.text());
    expected.parameters.push_back(name + ".bias " + first.text());
    if (weight.size() > 1) continue;
    expected.buffers.push_back(name + ".running_mean " + first.text());
    expected.buffers.push_back(name + ".running_var " + first.text());
  }
  return expected;
}

TEST_CASE("The models have PyTorch's tensors: names, order, shapes", "[nn]") {
  struct Case {
    ModelOptions options;
    const char* layers;
  };
  for (const auto& [options, layers] :
       {Case{{.kind = ModelKind::seed, .dropout = true}, kSeedLayers},
        Case{{.kind = ModelKind::seed_bn}, kSeedBnLayers},
        Case{{.kind = ModelKind::resnet18, .width = 8}, kResNetWidth8Layers}}) {
    const Model model = make_model(options);
    Names parameters, buffers;
    for (const Parameter* p : model.network->parameters()) {
      parameters.push_back(p->name + " " + torch_shape(*p).text());
    }
    for (const ModelBuffer* b : model.network->buffers()) {
      buffers.push_back(b->name + " " + b->shape.text());
    }
    const Expected expected = expected_tensors(layers);
    CHECK(parameters == expected.parameters);
    CHECK(buffers == expected.buffers);
  }
}

TEST_CASE("The models have the known numbers of parameters", "[nn]") {
  const auto count = [](const ModelOptions& options) {
    const Model model = make_model(options);
    int64_t elements = 0;
    for (const Parameter* p : model.network->parameters()) elements += p->shape.elements();
    return elements;
  };
  CHECK(count({.kind = ModelKind::seed}) == 21'840);
  CHECK(count({.kind = ModelKind::seed_bn}) == 21'840 + 2 * (10 + 20));
  CHECK(count({.kind = ModelKind::resnet18, .width = 64}) == 11'175'818);
  CHECK(count({.kind = ModelKind::seed_skip}) == 21'840 + 50 * 50 + 50);
  CHECK(count({.kind = ModelKind::mlp, .width = 64}) ==
        784 * 256 + 256 + 3 * (256 * 256 + 256) + 256 * 10 + 10);
  CHECK(count({.kind = ModelKind::mlp, .width = 6, .depth = 9}) ==
        784 * 24 + 24 + 7 * (24 * 24 + 24) + 24 * 10 + 10);
  CHECK(count({.kind = ModelKind::mlp, .depth = 1}) == 784 * 10 + 10);
  CHECK(TestNetwork({.kind = ModelKind::seed}).parameters.count() == 21'840);
}

TEST_CASE("The layers stand in the order of the published networks, dropout where asked", "[nn]") {
  const auto layers = [](const ModelOptions& options) {
    const Model model = make_model(options);
    Names names;
    for (const auto& module : model.network->children()) names.push_back(module->name());
    return names;
  };
  CHECK(layers({.kind = ModelKind::seed}) ==
        Names{"conv1", "pool1", "conv2", "pool2", "flatten", "fc1", "fc2", "log_softmax"});
  CHECK(layers({.kind = ModelKind::seed, .dropout = true}) ==
        Names{"conv1", "pool1", "conv2", "drop2d", "pool2", "flatten", "fc1", "drop1d", "fc2",
              "log_softmax"});
  CHECK(layers({.kind = ModelKind::seed_bn, .dropout = true}) ==
        Names{"conv1", "bn1", "pool1", "conv2", "bn2", "drop2d", "pool2", "flatten", "fc1",
              "drop1d", "fc2", "log_softmax"});
  CHECK(layers({.kind = ModelKind::seed_skip}) ==
        Names{"conv1", "pool1", "conv2", "pool2", "flatten", "fc1", "extra", "fc2", "log_softmax"});
  CHECK(layers({.kind = ModelKind::mlp}) == Names{"flatten", "fc1", "fc2", "fc3", "fc4", "fc5"});
  CHECK(layers({.kind = ModelKind::mlp, .depth = 2}) == Names{"flatten", "fc1", "fc2"});
  CHECK(layers({.kind = ModelKind::resnet18, .width = 2}) == Names{"stem_conv", "stem_bn", "block1",
                                                                   "block2", "block3", "block4",
                                                                   "gap", "flatten", "fc"});
}

TEST_CASE("The models follow the size and the channels of the images", "[nn]") {
  for (const ModelKind kind :
       {ModelKind::seed, ModelKind::seed_bn, ModelKind::mlp, ModelKind::resnet18}) {
    TestNetwork net(
        {.kind = kind, .width = 2, .height = 32, .width_pixels = 30, .channels = 3, .classes = 7});
    const Shape shape{2, 32, 30, 3};
    const Tensor images = net.device.put(shape, random_values(shape, 1));
    CHECK(net.model.network->forward(images, net.context).shape() == Shape{2, 7});
  }
}

TEST_CASE("Floating-point operations are counted as twice the multiplications", "[nn]") {
  // Per sample, forward: conv1 24*24*10*25, conv2 8*8*20*250, fc1 320*50, fc2 50*10
  // multiplications. Backward has each once for the weights and, but for conv1, once for the input.
  const double conv1 = 2.0 * 24 * 24 * 10 * 25,
               rest = 2.0 * (8 * 8 * 20 * 250 + 320 * 50 + 50 * 10);
  TestNetwork net({.kind = ModelKind::seed});
  net.step({3, 28, 28, 1}, net.device.labels({1, 2, 3}));
  CHECK(net.context.flops() == 3 * (2 * conv1 + 3 * rest));
  net.context.facts = {.training = false};  // evaluation must not count as training's work
  net.model.network->forward(net.device.filled({3, 28, 28, 1}, 0), net.context);
  CHECK(net.context.flops() == 3 * (2 * conv1 + 3 * rest));
}

// --- Flat buffers --------------------------------------------------------------------------------

TEST_CASE("Flat buffers hold the parameters in reverse order, 64-byte aligned, gaps zero", "[nn]") {
  TestNetwork net({.kind = ModelKind::seed_bn});
  const FlatParameters& flat = net.parameters;
  const Optimizer optimizer(flat, {.momentum = 0.9, .weight_decay = 0.01});
  net.context.state().copy_from_host({{.learning_rate = Real(0.1), .loss_weight = Real(0.5)}});
  net.step({2, 28, 28, 1}, net.device.labels({1, 2}));
  optimizer.step(net.context.state(), net.device.filled({1}, 0));

  std::vector<bool> used(static_cast<size_t>(flat.values().elements()));
  int64_t next = 0;  // where the next parameter must be: everything before it is taken
  for (auto p = flat.parameters().rbegin(); p != flat.parameters().rend(); ++p) {
    INFO((*p)->name);
    const int64_t at = (*p)->value.data() - flat.values().data();
    CHECK(at == next);
    CHECK((*p)->grad.data() - flat.gradients().data() == at);
    CHECK(reinterpret_cast<uintptr_t>((*p)->value.data()) % 64 == 0);
    CHECK(reinterpret_cast<uintptr_t>((*p)->grad.data()) % 64 == 0);
    const int64_t end = at + (*p)->shape.elements(), step = 64 / int64_t{sizeof(Real)};
    std::fill(used.begin() + at, used.begin() + end, true);
    next = (end + step - 1) / step * step;
  }
  CHECK(flat.values().elements() == next);
  CHECK(flat.count() == std::ranges::count(used, true));
  CHECK(std::ranges::count(used, false) > 0);
  for (const Tensor& buffer :
       {flat.values(), flat.gradients(), optimizer.state().at(0).ranges.at(0)}) {
    const Values values = buffer.to_host();
    int64_t dirty = 0, zeros = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      dirty += !used[i] && values[i] != 0;
      zeros += used[i] && values[i] == 0;
    }
    CHECK(dirty == 0);
    CHECK(zeros < flat.count() / 2);  // the step did reach the parameters
  }
}

// --- State ---------------------------------------------------------------------------------------

bool same(const StateTensor& a, const StateTensor& b) {
  return a.name == b.name && a.shape == b.shape && a.real == b.real && a.integer == b.integer;
}

TEST_CASE("A state survives being saved and loaded bit by bit", "[nn]") {
  for (const ModelKind kind : {ModelKind::seed, ModelKind::seed_bn, ModelKind::resnet18}) {
    TestNetwork a({.kind = kind, .width = 2}, 1), b({.kind = kind, .width = 2}, 2);
    a.step({3, 28, 28, 1}, a.device.labels({1, 2, 3}));  // moves the running statistics
    const std::vector<StateTensor> saved = state_dict(*a.model.network);
    CHECK_FALSE(std::ranges::equal(state_dict(*b.model.network), saved, same));
    load_state_dict(*b.model.network, saved);
    CHECK(std::ranges::equal(state_dict(*b.model.network), saved, same));
    CHECK(b.parameters.values().to_host() == a.parameters.values().to_host());
  }
}

TEST_CASE("The state has PyTorch's layout: weights of convolutions O,I,H,W", "[nn]") {
  TestNetwork net({.kind = ModelKind::seed_bn});
  const Parameter* weight = net.parameters.parameters()[4];
  REQUIRE(weight->name == "conv2.weight");
  REQUIRE(weight->shape == Shape{20, 5, 5, 10});
  const std::vector<StateTensor> state = state_dict(*net.model.network);
  const StateTensor& saved = find(state, "conv2.weight");
  CHECK(saved.shape == Shape{20, 10, 5, 5});
  const Values ours = weight->value.to_host();
  int64_t wrong = 0;
  for (int64_t o = 0; o < 20; ++o)
    for (int64_t i = 0; i < 10; ++i)
      for (int64_t tap = 0; tap < 25; ++tap)
        wrong += saved.real[(o * 10 + i) * 25 + tap] != ours[(o * 25 + tap) * 10 + i];
  CHECK(wrong == 0);
  CHECK(from_torch_layout(*weight, saved.real) == ours);
  // Everything else is where it was.
  CHECK(find(state, "fc1.weight").real == net.parameters.parameters()[8]->value.to_host());
  CHECK(find(state, "bn1.running_var").real == Values(10, 1));
  const StateTensor& tracked = find(state, "bn2.num_batches_tracked");
  CHECK(tracked.shape == Shape{});
  CHECK(tracked.integer == std::vector<int64_t>{0});
}

TEST_CASE("A state that does not fit is refused with everything that is wrong", "[nn]") {
  TestNetwork net({.kind = ModelKind::seed_bn}, 1);
  const std::vector<StateTensor> before = state_dict(*net.model.network);
  TestNetwork other({.kind = ModelKind::seed_bn}, 2);
  std::vector<StateTensor> bad = state_dict(*other.model.network);
  std::erase_if(bad, [](const StateTensor& t) {
    return t.name == "fc1.bias" || t.name == "bn2.running_var";
  });
  const_cast<StateTensor&>(find(bad, "conv2.weight")).shape = {20, 5, 5, 10};
  const_cast<StateTensor&>(find(bad, "bn1.running_mean")).shape = {1, 10};
  bad.push_back({"fc3.weight", {2}, {1, 2}, {}});
  CHECK_THROWS_AS(load_state_dict(*net.model.network, bad), BadInput);
  CHECK_THROWS_WITH(
      load_state_dict(*net.model.network, bad),
      ContainsSubstring("missing fc1.bias") && ContainsSubstring("missing bn2.running_var") &&
          ContainsSubstring("conv2.weight has shape [20, 5, 5, 10], expected [20, 10, 5, 5]") &&
          ContainsSubstring("bn1.running_mean has shape [1, 10], expected [10]") &&
          ContainsSubstring("unexpected fc3.weight"));
  CHECK(std::ranges::equal(state_dict(*net.model.network), before, same));
  // A network without memory can tell as well.
  const Model bare = make_model({.kind = ModelKind::seed_bn});
  CHECK_NOTHROW(check_state_dict(*bare.network, before));
  CHECK_THROWS_WITH(check_state_dict(*bare.network, bad),
                    ContainsSubstring("missing fc1.bias") &&
                        ContainsSubstring("conv2.weight has shape [20, 5, 5, 10]") &&
                        ContainsSubstring("unexpected fc3.weight"));
}

TEST_CASE("The number of batches tracked is restored where it is given, and may be missing",
          "[nn]") {
  TestNetwork net({.kind = ModelKind::seed_bn});
  std::vector<StateTensor> state = state_dict(*net.model.network);
  const_cast<StateTensor&>(find(state, "bn1.num_batches_tracked")).integer = {41};
  load_state_dict(*net.model.network, state);
  CHECK(find(state_dict(*net.model.network), "bn1.num_batches_tracked").integer[0] == 41);
  net.step({2, 28, 28, 1}, net.device.labels({1, 2}));
  CHECK(find(state_dict(*net.model.network), "bn1.num_batches_tracked").integer[0] == 42);
  std::erase_if(state, [](const StateTensor& t) { return t.name.ends_with("tracked"); });
  CHECK_NOTHROW(load_state_dict(*net.model.network, state));
}

// --- Initial values ------------------------------------------------------------------------------

TEST_CASE("Names are hashed by FNV-1a", "[nn]") {
  CHECK(hash_name("") == 0x811c9dc5u);
  CHECK(hash_name("a") == 0xe40c292cu);
  CHECK(hash_name("foobar") == 0xbf9cf968u);
}

TEST_CASE("Initial values are uniform within 1/sqrt(fan_in), and zero mean", "[nn]") {
  TestNetwork net({.kind = ModelKind::seed_bn});
  const std::map<std::string, double> fan_in{
      {"conv1", 25}, {"conv2", 250}, {"fc1", 320}, {"fc2", 50}};
  for (const Parameter* p : net.parameters.parameters()) {
    INFO(p->name);
    const Values values = p->value.to_host();
    const std::string layer = p->name.substr(0, p->name.find('.'));
    if (!fan_in.contains(layer)) {
      CHECK(values == Values(values.size(), p->kind == ParameterKind::norm_weight ? 1 : 0));
      continue;
    }
    CHECK(double(p->fan_in) == fan_in.at(layer));
    const double bound = 1 / std::sqrt(fan_in.at(layer)), n = double(values.size());
    double sum = 0, squares = 0, largest = 0;
    for (const Real v : values) {
      sum += v;
      squares += double(v) * v;
      largest = std::max(largest, std::abs(double(v)));
    }
    CHECK(largest <= bound * (1 + 1e-6));
    CHECK(largest >= bound * (n >= 50 ? 0.9 : 0.5));
    // Five standard deviations of the mean, and of the mean square, of n uniform numbers.
    CHECK(std::abs(sum / n) <= 5 * bound / std::sqrt(3 * n));
    CHECK(std::abs(squares / n - bound * bound / 3) <= 5 * bound * bound * std::sqrt(4 / (45 * n)));
  }
}

TEST_CASE("Initial values depend on the seed and the layer's name alone", "[nn]") {
  TestNetwork seed({.kind = ModelKind::seed}), bn({.kind = ModelKind::seed_bn, .dropout = true});
  TestNetwork other({.kind = ModelKind::seed}, 2), far({.kind = ModelKind::seed}, 1 + (1ull << 32));
  const auto with_norm = state_dict(*bn.model.network);
  const auto with_seed2 = state_dict(*other.model.network),
             with_far = state_dict(*far.model.network);
  for (const StateTensor& tensor : state_dict(*seed.model.network)) {
    INFO(tensor.name);
    CHECK(find(with_norm, tensor.name).real == tensor.real);
    CHECK(find(with_seed2, tensor.name).real != tensor.real);
    CHECK(find(with_far, tensor.name).real != tensor.real);
  }
}

TEST_CASE("Initial values are the recorded ones, in both precisions", "[nn]") {
  // From another program that follows the C++ standard's seed_seq and mt19937; in PyTorch's order.
  const std::map<std::string, std::vector<double>> uniform{
      {"conv1.weight",
       {0.09158058166503907, -0.055354881286621097, 0.042520999908447266, 0.07159290313720704}},
      {"conv1.bias", {0.11595633029937745, 0.11227383613586427}},
      {"conv2.weight",
       {0.05559512246432626, 0.04017685655460456, -0.04209945590536988, -0.011009726485892156}},
      {"fc1.weight",
       {0.013559018038235863, 0.026086082066176665, -0.019416295837924435, 0.015032082324617984}},
      {"fc2.bias", {-0.05437063154955101, 0.10945833272092696}}};
  const double tolerance = kDouble ? 1e-15 : 1e-7;
  TestNetwork net({.kind = ModelKind::seed});
  const auto state = state_dict(*net.model.network);
  for (const auto& [name, expected] : uniform) {
    const Values& found = find(state, name).real;
    CHECK(relative_error(Values(found.begin(), found.begin() + expected.size()), expected) <=
          tolerance);
  }
  TestNetwork normal({.kind = ModelKind::seed}, 1, Initializer::normal);
  const auto normal_state = state_dict(*normal.model.network);
  const Values& found = find(normal_state, "conv1.weight").real;
  const std::vector<double> expected{-0.010425337173157882, -0.0058925177352176636,
                                     0.009665322106157743};
  CHECK(relative_error(Values(found.begin(), found.begin() + 3), expected) <= 10 * tolerance);
}

TEST_CASE("Normal initial values have standard deviation 0.01, biases 0", "[nn]") {
  TestNetwork net({.kind = ModelKind::seed}, 1, Initializer::normal);
  const auto state = state_dict(*net.model.network);
  const Values& weight = find(state, "fc1.weight").real;
  double sum = 0, squares = 0, within = 0;
  for (const Real v : weight) {
    sum += v;
    squares += double(v) * v;
    within += std::abs(v) < 0.01;
  }
  const double n = double(weight.size());
  CHECK(std::abs(sum / n) <= 5 * 0.01 / std::sqrt(n));
  CHECK(std::abs(squares / n / 1e-4 - 1) <= 5 * std::sqrt(2 / n));
  CHECK(std::abs(within / n - 0.6827) <= 5 * std::sqrt(0.6827 * 0.3173 / n));
  CHECK(find(state, "fc1.bias").real == Values(50, 0));
}

// --- Which parameters have a gradient ------------------------------------------------------------

TEST_CASE("A parameter has a gradient if any pass since the last zeroing has given it one",
          "[nn]") {
  TestNetwork net({.kind = ModelKind::seed_skip});  // steps 1, 3, ... leave extra.inner out
  const Optimizer adam(net.parameters, {.kind = OptimizerKind::adamw});
  net.context.state().copy_from_host({{.learning_rate = Real(0.1), .loss_weight = 1}});
  const auto pass = [&](int64_t step, bool last) {
    net.context.facts.step = step;
    net.context.facts.last_contribution = last;
    net.step({1, 28, 28, 1}, net.device.labels({3}));
  };
  const auto update = [&] {
    adam.step(net.context.state(), net.parameters.loss());
    std::map<std::string, int64_t> steps;
    for (size_t i = 0; i < adam.parameters().size(); ++i) {
      steps[adam.parameters()[i]->name] = adam.steps()[i];
    }
    return std::pair(steps.at("fc1.bias"), steps.at("extra.inner.bias"));
  };
  // Of two micro-batches the first alone uses the layer.
  adam.zero_gradients();
  pass(0, false);
  pass(1, true);
  CHECK(update() == std::pair<int64_t, int64_t>{1, 1});
  // What was zeroed without a step is forgotten, whoever zeroes it.
  pass(0, true);
  adam.zero_gradients();
  pass(1, true);
  CHECK(update() == std::pair<int64_t, int64_t>{2, 1});
  pass(0, true);
  net.parameters.zero_gradients();
  pass(1, true);
  CHECK(update() == std::pair<int64_t, int64_t>{3, 1});
}

TEST_CASE("What the network or a copy of it has used has a gradient", "[nn]") {
  for (const int64_t step : {0, 1}) {
    TestNetwork net({.kind = ModelKind::seed_skip}), copy({.kind = ModelKind::seed_skip});
    net.context.facts.step = step;
    copy.context.facts.step = 1 - step;  // one of the two leaves extra.inner out
    for (TestNetwork* each : {&net, &copy}) {
      each->context.state().copy_from_host({{.loss_weight = 1}});
      each->step({1, 28, 28, 1}, each->device.labels({3}));
    }
    const GradientMarks& marks = net.parameters.marks();
    marks.add(copy.parameters.marks());
    marks.write(net.device.stream);
    CHECK(marks.marks().to_host() == Values(10, 1));
  }
}

}  // namespace
}  // namespace lockstep
