// Modules and what stands around them: names, flat buffers, hooks, state, initial values, rates.

#include <iterator>
#include <map>
#include <sstream>
#include <string_view>

#include "common/core/error.h"
#include "common/nn/batch_norm.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/residual.h"
#include "common/nn/sgd.h"
#include "common/nn/state.h"
#include "common/options/options.h"
#include "tests/support/catch.h"
#include "tests/support/empty_pass.h"
#include "tests/support/nn_test_support.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::kDouble;
using testing::random_values;
using testing::relative_error;
using testing::TestDevice;
using Values = std::vector<Real>;
using Names = std::vector<std::string>;

/// A network on a device, with its parameters initialised.
struct TestNetwork {
  explicit TestNetwork(const ModelOptions& options, uint64_t seed = 1,
                       Initializer initializer = Initializer::kaiming_uniform)
      : model(make_model(options)), parameters(*model.network, device.stream) {
    initialize(parameters, initializer, seed);
  }

  /// The loss of a batch, gradients added.
  Real step(const Shape& shape, const LabelTensor& labels) {
    const Tensor images = device.put(shape, random_values(shape, 7)), loss = device.filled({1}, 0);
    model.loss->forward(model.network->forward(images, context), labels, loss, context);
    model.network->backward(model.loss->backward(labels, context), context);
    return loss.to_host()[0];
  }

  TestDevice device;
  Model model;
  FlatParameters parameters;
  Context context{device.stream};
};

const StateTensor& find(const std::vector<StateTensor>& state, std::string_view name) {
  const auto found = std::ranges::find(state, name, &StateTensor::name);
  INFO(name);
  REQUIRE(found != state.end());
  return *found;
}

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
  CHECK(layers({.kind = ModelKind::resnet18, .width = 2}) == Names{"stem_conv", "stem_bn", "block1",
                                                                   "block2", "block3", "block4",
                                                                   "gap", "flatten", "fc"});
}

TEST_CASE("The models follow the size and the channels of the images", "[nn]") {
  for (const ModelKind kind : {ModelKind::seed, ModelKind::seed_bn, ModelKind::resnet18}) {
    TestNetwork net(
        {.kind = kind, .width = 2, .height = 32, .width_pixels = 30, .channels = 3, .classes = 7});
    const Shape shape{2, 32, 30, 3};
    const Tensor images = net.device.put(shape, random_values(shape, 1));
    CHECK(net.model.network->forward(images, net.context).shape() == Shape{2, 7});
  }
  CHECK_THROWS_WITH(parse_model("vgg"), ContainsSubstring("'vgg'") && ContainsSubstring("seed-bn"));
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

// --- Errors --------------------------------------------------------------------------------------

TEST_CASE("A layer that gets the wrong shape names itself, the shape and what it expected",
          "[nn]") {
  const TestDevice d;
  Context context(d.stream);
  const auto error = [&](std::unique_ptr<Module> layer, const Shape& shape) {
    auto net = std::make_unique<Sequential>();
    net->add("outer", std::move(layer));
    net->set_name("");
    const FlatParameters parameters(*net, d.stream);
    try {
      net->forward(d.filled(shape, 1), context);
    } catch (const BadInput& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  const auto conv = [] { return std::make_unique<Conv2d>(3, 4, Conv2d::Options{.kernel = 5}); };
  using Catch::Matchers::StartsWith;
  CHECK_THAT(error(conv(), {2, 8, 8, 1}), StartsWith("outer: channels of input [2, 8, 8, 1]") &&
                                              ContainsSubstring("found 1, expected 3"));
  CHECK_THAT(error(conv(), {2, 8, 24}), StartsWith("outer: input [2, 8, 24] is not"));
  CHECK_THAT(error(conv(), {2, 4, 8, 3}), StartsWith("outer: input [2, 4, 8, 3]") &&
                                              ContainsSubstring("smaller than the 5x5 window"));
  CHECK_THAT(
      error(std::make_unique<Linear>(10, 2), {4, 9}),
      StartsWith("outer: features of input [4, 9]") && ContainsSubstring("found 9, expected 10"));
  CHECK_THAT(error(std::make_unique<Linear>(10, 2), {1, 1, 1, 10}), StartsWith("outer: input"));
  CHECK_THAT(error(std::make_unique<BatchNorm2d>(4), {2, 3, 3, 5}),
             StartsWith("outer: input [2, 3, 3, 5]") && ContainsSubstring("4]"));
  CHECK_THAT(error(std::make_unique<MaxPool2d>(2), {2, 3}), StartsWith("outer: input [2, 3]"));
  CHECK_THAT(error(std::make_unique<Flatten>(), {2, 3}), StartsWith("outer: input [2, 3]"));
  CHECK_THROWS_WITH(MaxPool2d(0), ContainsSubstring("kernel 0 is not 1 or larger"));
  CHECK_THROWS_WITH(Dropout(1, 1), ContainsSubstring("probability 1"));
}

TEST_CASE("Batch normalisation in training refuses one value per channel", "[nn][row13]") {
  const TestDevice d;
  BatchNorm2d norm(3);
  norm.set_name("bn1");
  const FlatParameters parameters(norm, d.stream);
  initialize(parameters, Initializer::kaiming_uniform, 1);
  Context context(d.stream);
  const Tensor x = d.put({1, 1, 1, 3}, {1, 2, 3});
  CHECK_THROWS_AS(norm.forward(x, context), BadInput);
  CHECK_THROWS_WITH(norm.forward(x, context),
                    ContainsSubstring("bn1: one value per channel (input [1, 1, 1, 3])"));
  CHECK(parameters.buffers()[0]->value.to_host() == Values{0, 0, 0});
  CHECK(norm.batches_tracked() == 0);

  context.facts.training = false;  // running mean 0, running variance 1
  const std::vector<double> expected{1 / std::sqrt(1 + 1e-5), 2 / std::sqrt(1 + 1e-5),
                                     3 / std::sqrt(1 + 1e-5)};
  CHECK(relative_error(norm.forward(x, context).to_host(), expected) <= 1e-6);
}

TEST_CASE("Backward needs a forward in training mode before it", "[nn]") {
  const TestDevice d;
  Linear linear(2, 2);
  linear.set_name("fc1");
  const FlatParameters parameters(linear, d.stream);
  initialize(parameters, Initializer::kaiming_uniform, 1);
  Context context(d.stream);
  const Tensor x = d.put({1, 2}, {1, 2});
  const auto refused = ContainsSubstring("fc1: backward without a forward in training mode");
  CHECK_THROWS_WITH(linear.backward(x, context), refused);
  linear.forward(x, context);
  linear.backward(x, context);
  CHECK_THROWS_WITH(linear.backward(x, context), refused);  // once per forward
  linear.forward(x, context);
  context.clear();
  CHECK_THROWS_WITH(linear.backward(x, context), refused);
  context.facts.training = false;
  linear.forward(x, context);
  CHECK_THROWS_WITH(linear.backward(x, context), refused);
}

// --- Batch normalisation's running statistics ----------------------------------------------------

TEST_CASE("Running statistics move by a tenth, with the unbiased variance", "[nn][row12]") {
  const TestDevice d;
  BatchNorm2d norm(1);
  const FlatParameters parameters(norm, d.stream);
  initialize(parameters, Initializer::kaiming_uniform, 1);
  const Tensor &mean = norm.buffers()[0]->value, &var = norm.buffers()[1]->value;
  Context context(d.stream);
  // Four values with mean 3 and squared distances 4+0+0+4: variance 2, unbiased 8/3.
  const Tensor x = d.put({1, 2, 2, 1}, {1, 3, 3, 5});
  const double tolerance = kDouble ? 1e-14 : 1e-6;
  const auto check = [&](double expected_mean, double expected_var, int64_t tracked) {
    CHECK(std::abs(mean.to_host()[0] - expected_mean) <= tolerance);
    CHECK(std::abs(var.to_host()[0] - expected_var) <= tolerance);
    CHECK(norm.batches_tracked() == tracked);
  };
  norm.forward(x, context);
  const double mean1 = 0.3, var1 = 0.9 + 0.1 * 8 / 3;
  check(mean1, var1, 1);
  norm.forward(x, context);
  const double mean2 = 0.9 * mean1 + 0.3, var2 = 0.9 * var1 + 0.1 * 8 / 3;
  check(mean2, var2, 2);

  // What must leave them alone: a second forward of the same samples, and a part of the batch whose
  // statistics do not count. The output is that of training all the same.
  const double invstd = 1 / std::sqrt(2 + 1e-5);
  const std::vector<double> normalized{-2 * invstd, 0, 0, 2 * invstd};
  context.facts.recompute = true;
  CHECK(relative_error(norm.forward(x, context).to_host(), normalized) <= 1e-6);
  context.facts = {.update_running = false};
  CHECK(relative_error(norm.forward(x, context).to_host(), normalized) <= 1e-6);
  check(mean2, var2, 2);

  context.facts = {.training = false};
  const Values y = norm.forward(x, context).to_host();
  CHECK(std::abs(y[0] - (1 - mean2) / std::sqrt(var2 + 1e-5)) <= tolerance);
  check(mean2, var2, 2);
}

// --- Flat buffers --------------------------------------------------------------------------------

TEST_CASE("Flat buffers hold the parameters in reverse order, 64-byte aligned, gaps zero", "[nn]") {
  TestNetwork net({.kind = ModelKind::seed_bn});
  const FlatParameters& flat = net.parameters;
  const Sgd optimizer(flat, {.momentum = Real(0.9), .weight_decay = Real(0.01)});
  net.context.state().copy_from_host({{.learning_rate = Real(0.1), .loss_weight = Real(0.5)}});
  net.step({2, 28, 28, 1}, net.device.labels({1, 2}));
  optimizer.step(net.context.state(), net.device.filled({1}, 0));

  std::vector<bool> used(static_cast<size_t>(flat.values().elements()));
  int64_t next = 0;  // where the next parameter must lie: everything before it is taken
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
  for (const Tensor& buffer : {flat.values(), flat.gradients(), optimizer.velocity()}) {
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

// --- Empty batches -------------------------------------------------------------------------------

TEST_CASE("A pass without samples reaches every layer and changes nothing", "[nn][row90]") {
  for (const auto engine : {cpu::EngineKind::best, cpu::EngineKind::reference}) {
    for (const int threads : {1, 2}) {
      const TestDevice d(threads, engine);
      for (const ModelOptions& options : testing::networks_for_empty_passes()) {
        INFO(d.device->description() << ", model " << int(options.kind));
        CHECK_NOTHROW(testing::require_empty_pass(d.stream, options));
      }
    }
  }
}

// --- The gradient hook ---------------------------------------------------------------------------

/// Hooks that enqueue a copy of the gradient, as a reduction over ranks would be.
struct Hooks {
  explicit Hooks(TestNetwork& net) {
    for (Parameter* p : net.parameters.parameters()) {
      p->on_gradient_ready = [this, stream = net.device.stream](Parameter& q) {
        Values& copy = copies[q.name];
        copy.resize(static_cast<size_t>(q.shape.elements()));
        stream.copy(copy.data(), q.grad.data(), q.grad.bytes());
        order.push_back(q.name);
      };
    }
  }
  Names order;
  std::map<std::string, Values> copies;
};

TEST_CASE("The gradient hook is called once per step and parameter, when the gradient is complete",
          "[nn]") {
  for (const ModelKind kind : {ModelKind::seed, ModelKind::seed_bn, ModelKind::resnet18}) {
    TestNetwork net({.kind = kind, .width = 2});
    Hooks hooks(net);
    net.context.state().copy_from_host({{.loss_weight = Real(0.25)}});
    const Shape shape{2, 28, 28, 1};
    net.context.facts.last_contribution = false;
    net.step(shape, net.device.labels({3, 1}));
    CHECK(hooks.order.empty());
    net.context.facts.last_contribution = true;
    net.step(shape, net.device.labels({4, 0}));
    REQUIRE(hooks.order.size() == net.parameters.parameters().size());
    for (const Parameter* p : net.parameters.parameters()) {
      INFO(p->name);
      CHECK(hooks.copies.at(p->name) == p->grad.to_host());
    }
    net.step(shape, net.device.labels({4, 0}));
    CHECK(hooks.order.size() == 2 * net.parameters.parameters().size());
  }
}

TEST_CASE("The gradient hooks come in the order of backward", "[nn]") {
  TestNetwork seed({.kind = ModelKind::seed});
  const Hooks of_seed(seed);
  seed.step({2, 28, 28, 1}, seed.device.labels({3, 1}));
  CHECK(of_seed.order == Names{"fc2.bias", "fc2.weight", "fc1.bias", "fc1.weight", "conv2.bias",
                               "conv2.weight", "conv1.bias", "conv1.weight"});

  TestNetwork resnet({.kind = ModelKind::resnet18, .width = 2});
  const Hooks of_resnet(resnet);
  resnet.step({2, 28, 28, 1}, resnet.device.labels({3, 1}));
  Names expected{"fc.bias", "fc.weight"};
  for (const int block : {4, 3, 2, 1}) {
    for (const int residual : {1, 0}) {
      for (const char* layer : {"bn2", "conv2", "bn1", "conv1", "conv3"}) {
        const bool has_conv3 = block > 1 && residual == 0;
        if (layer == std::string("conv3") && !has_conv3) continue;
        const std::string name = fmt::format("block{}.{}.{}", block, residual, layer);
        expected.insert(expected.end(), {name + ".bias", name + ".weight"});
      }
    }
  }
  expected.insert(expected.end(),
                  {"stem_bn.bias", "stem_bn.weight", "stem_conv.bias", "stem_conv.weight"});
  CHECK(of_resnet.order == expected);
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
  // Everything else lies as it is.
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
  CHECK(parse_initializer("kaiming") == Initializer::kaiming_uniform);
  CHECK(parse_initializer("normal") == Initializer::normal);
  CHECK_THROWS_WITH(parse_initializer("zeros"), ContainsSubstring("'zeros'"));
}

// --- Training ------------------------------------------------------------------------------------

TEST_CASE("Learning rates: constant, in steps as PyTorch's StepLR, after a linear warm-up",
          "[nn]") {
  const auto rates = [](const LearningRateSchedule& schedule, int64_t steps) {
    std::vector<double> all;
    for (int64_t step = 0; step < steps; ++step) all.push_back(schedule.at(step));
    return all;
  };
  CHECK(rates({.base = 0.1}, 3) == std::vector<double>{0.1, 0.1, 0.1});
  // Recorded: StepLR(SGD(lr=0.1), step_size=3, gamma=0.5)
  CHECK(relative_error(rates({.base = 0.1, .decay_steps = 3, .gamma = 0.5}, 10),
                       std::vector<double>{0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025,
                                           0.0125}) <= 1e-15);
  CHECK(relative_error(rates({.base = 0.8, .warmup_from = 0.2, .warmup_steps = 3}, 5),
                       std::vector<double>{0.4, 0.6, 0.8, 0.8, 0.8}) <= 1e-15);
  CHECK(relative_error(rates({.base = 1, .warmup_steps = 2, .decay_steps = 2, .gamma = 0.1}, 6),
                       std::vector<double>{0.5, 1, 0.1, 0.1, 0.01, 0.01}) <= 1e-15);
}

TEST_CASE("--scale-lr multiplies the rate by batch size / base, and warms up from the base rate",
          "[nn]") {
  Options options;
  options.batch_size = 512;
  options.lr = 0.1;
  CHECK(options.schedule(100).at(0) == 0.1);
  options.scale_lr = 256;
  CHECK(options.schedule(100).at(0) == 0.2);
  options.warmup_epochs = 0.5;
  CHECK(options.schedule(100).at(0) == Approx(0.1 + 0.1 / 50));
  CHECK(options.schedule(100).at(49) == Approx(0.2));
  options.lr_step = 2;
  CHECK(options.schedule(100).at(199) == Approx(0.2));
  CHECK(options.schedule(100).at(200) == Approx(0.02));
  options.scale_lr = 0;
  CHECK(options.schedule(100).at(0) == Approx(0.1 / 50));  // from 0
}

TEST_CASE("A gradient or a loss that is not finite stops the weights where they are", "[nn]") {
  const Real nan = std::numeric_limits<Real>::quiet_NaN();
  for (const bool in_loss : {false, true}) {
    TestNetwork net({.kind = ModelKind::seed});
    const Sgd optimizer(net.parameters, {});
    CHECK_FALSE(optimizer.velocity().defined());
    const Tensor good = net.device.filled({1}, 1);
    const auto step = [&](int64_t number, const Tensor& loss) {
      net.context.state().copy_from_host({{.step = number, .learning_rate = Real(0.1)}});
      optimizer.step(net.context.state(), loss);
      return optimizer.health().to_host()[0].failed_step;
    };
    net.device.kernels().fill(net.device.stream, 1, net.parameters.gradients());
    const Values start = net.parameters.values().to_host();
    CHECK(step(0, good) == -1);
    const Values after = net.parameters.values().to_host();
    CHECK(after != start);
    if (!in_loss) net.parameters.parameters()[3]->grad.range(7, {1}).copy_from_host({nan});
    CHECK(step(1, in_loss ? net.device.filled({1}, nan) : good) == 1);
    CHECK(net.parameters.values().to_host() == after);
    net.device.kernels().fill(net.device.stream, 1, net.parameters.gradients());
    CHECK(step(2, good) == 1);
    CHECK(net.parameters.values().to_host() == after);
  }
}

TEST_CASE("The halves of a layer, the second behind the sum of two first, are that layer", "[nn]") {
  const TestDevice d;
  Context context(d.stream);
  /// Output of a layer over x + x, and of its halves where each x had a product of its own.
  const auto check = [&](auto& layer, const Shape& shape) {
    const FlatParameters parameters(layer, d.stream);
    initialize(parameters, Initializer::kaiming_uniform, 1);
    Values values = random_values(shape, 3);
    const Tensor x = d.put(shape, values);
    for (Real& value : values) value *= 2;
    const Values whole = layer.forward(d.put(shape, values), context).to_host();
    const Tensor y = layer.product(x, context), same = layer.product(x, context);
    d.kernels().add(d.stream, same, y);
    layer.add_bias(y, context);
    CHECK(relative_error(y.to_host(), whole) <= (kDouble ? 1e-14 : 1e-6));
  };
  Conv2d convolution(3, 5, {.kernel = 3, .padding = 1});
  check(convolution, {2, 6, 7, 3});
  Linear linear(9, 4, Activation::relu);
  check(linear, {5, 9});
}

TEST_CASE("Dropout of a part of the channels drops what the whole layer drops there", "[nn]") {
  const TestDevice d;
  Context context(d.stream);
  context.state().copy_from_host({{.step = 4, .first_position = 9}});
  const int64_t samples = 7, channels = 21;
  Dropout2d whole(Real(0.5), 3), part(Real(0.5), 3);
  part.set_first_feature(6);
  const Values y = whole.forward(d.filled({samples, 2, 1, channels}, 1), context).to_host();
  const Values of_part = part.forward(d.filled({samples, 2, 1, 10}, 1), context).to_host();
  for (int64_t row = 0; row < samples * 2; ++row) {
    const auto first = y.begin() + row * channels + 6;
    CHECK(std::equal(first, first + 10, of_part.begin() + row * 10));
  }
}

TEST_CASE("Dropout is the identity in evaluation and scales what it keeps in training", "[nn]") {
  const TestDevice d;
  Context context(d.stream);
  context.state().copy_from_host({StepState{}});
  Dropout dropout(Real(0.25), 1);
  dropout.set_name("drop");
  const Shape shape{4, 100};
  const Values values = random_values(shape, 1);
  const Tensor x = d.put(shape, values);
  const Values y = dropout.forward(x, context).to_host();
  int64_t dropped = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    dropped += y[i] == 0;
    CHECK((y[i] == 0 || y[i] == values[i] * (1 / Real(0.75))));
  }
  CHECK(dropped > 50);
  CHECK(dropped < 150);
  Dropout other(Real(0.25), 1);
  other.set_name("drop2");
  CHECK(other.forward(x, context).to_host() != y);  // another layer, another mask
  context.facts.training = false;
  CHECK(dropout.forward(x, context).to_host() == values);
}

TEST_CASE("The seed network learns 32 random samples by heart", "[nn][row15]") {
  TestNetwork net({.kind = ModelKind::seed});
  const Sgd optimizer(net.parameters, {.momentum = Real(0.9)});
  std::vector<int32_t> labels;
  for (int32_t i = 0; i < 32; ++i) labels.push_back(i * 7 % 10);
  const LabelTensor expected = net.device.labels(labels);
  Real loss = 0;
  int64_t step = 0;
  for (; step < 400; ++step) {
    net.context.state().copy_from_host(
        {{.step = step, .learning_rate = Real(0.1), .loss_weight = Real(1) / 32}});
    optimizer.zero_gradients();
    loss = net.step({32, 28, 28, 1}, expected);
    if (loss < 1e-2) break;
    optimizer.step(net.context.state(), net.device.filled({1}, loss));
  }
  INFO("loss after " << step << " steps");
  CHECK(loss < 1e-2);
}

TEST_CASE("A steady training step allocates nothing", "[nn]") {
  TestNetwork net({.kind = ModelKind::resnet18, .width = 2});
  const LabelTensor labels = net.device.labels({1, 2});
  // The first steps fill the pool: which block serves which tensor settles in the second.
  for (int i = 0; i < 3; ++i) net.step({2, 28, 28, 1}, labels);
  const int64_t allocations = net.context.pool().allocations();
  CHECK(allocations > 0);
  for (int i = 0; i < 5; ++i) net.step({2, 28, 28, 1}, labels);
  CHECK(net.context.pool().allocations() == allocations);
}

}  // namespace
}  // namespace lockstep
