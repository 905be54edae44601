// Modules and what surrounds them: errors, running statistics, hooks, rates, training.

#include <array>
#include <map>

#include "common/core/error.h"
#include "common/nn/batch_norm.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "common/nn/state_dict.h"
#include "common/options/options.h"
#include "tests/support/catch.h"
#include "tests/support/empty_pass.h"
#include "tests/support/nn_test_support.h"
#include "tests/unit/nn/test_network.h"

namespace lockstep {
namespace {

using namespace testing::nn;
using Catch::Matchers::ContainsSubstring;
using testing::kDouble;
using testing::random_values;
using testing::relative_error;
using testing::TestDevice;
using Values = std::vector<Real>;
using Names = std::vector<std::string>;

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

TEST_CASE("A layer that every second step leaves out has no gradient there, and is in evaluation",
          "[nn]") {
  TestNetwork net({.kind = ModelKind::seed_skip});
  Hooks hooks(net);
  net.context.state().copy_from_host({{.loss_weight = 1}});
  const Shape shape{1, 28, 28, 1};
  std::array<size_t, 4> called{};
  for (int step = 0; step < 4; ++step) {
    net.context.begin_step({.step = step});
    net.step(shape, net.device.labels({3}));
    called[size_t(step)] = hooks.order.size();
  }
  CHECK(called == std::array<size_t, 4>{10, 18, 28, 36});
  const Tensor images = net.device.put(shape, random_values(shape, 1));
  const auto scores = [&](bool training, int64_t step) {
    net.context.facts = {.training = training, .step = step};
    return net.model.network->forward(images, net.context).to_host();
  };
  CHECK(scores(false, 1) == scores(true, 0));
  CHECK(scores(true, 1) != scores(true, 0));
}

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

TEST_CASE("For Adam --scale-lr multiplies the rate by the root of batch size / base", "[nn]") {
  Options options;
  options.batch_size = 512;
  options.lr = 0.001;
  options.scale_lr = 64;
  for (const auto& [optimizer, rate] : {std::pair(OptimizerKind::sgd, 0.008),
                                        {OptimizerKind::adam, 0.001 * std::sqrt(8)},
                                        {OptimizerKind::adamw, 0.001 * std::sqrt(8)}}) {
    options.optimizer = optimizer;
    CHECK(options.schedule(100).at(0) == Approx(rate));
  }
  options.warmup_epochs = 1;
  CHECK(options.schedule(100).at(0) == Approx(0.001 + 0.001 * (std::sqrt(8) - 1) / 100));
}

TEST_CASE("A gradient or a loss that is not finite stops the weights where they are", "[nn]") {
  const Real nan = std::numeric_limits<Real>::quiet_NaN();
  const bool in_loss = GENERATE(false, true);
  for (const OptimizerKind kind : {OptimizerKind::sgd, OptimizerKind::adamw}) {
    TestNetwork net({.kind = ModelKind::seed});
    const Optimizer optimizer(net.parameters, {.kind = kind});
    CHECK(optimizer.state().size() == (kind == OptimizerKind::sgd ? 0 : 2));
    const Tensor good = net.device.filled({1}, 1);
    const auto step = [&](int64_t number, const Tensor& loss) {
      net.context.state().copy_from_host({{.step = number, .learning_rate = Real(0.1)}});
      optimizer.step(net.context.state(), loss);
      return optimizer.health().to_host()[0].failed_step;
    };
    net.device.kernels().fill(net.device.stream, 1, net.parameters.gradients());
    for (Parameter* p : net.parameters.parameters()) p->has_new_gradient = true;
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

TEST_CASE("The halves of a layer, the second after the sum of two first, are that layer", "[nn]") {
  const TestDevice d;
  Context context(d.stream);
  /// Output of a layer over x + x, and of its halves as if each x had its own product.
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

/// Two ranges of one device, as a rank has them whose shard of the parameters is in two places.
struct TwoRanges {
  explicit TwoRanges(const OptimizerRule& rule) : optimizer(device.stream, ranges, rule) {}
  void step(int64_t number, Real loss = 0) {
    optimizer.step(device.state({.step = number, .learning_rate = Real(0.1)}),
                   device.put({1}, {loss}));
  }
  void step(const ClipByNorm& clip) {
    optimizer.step(device.state({.learning_rate = Real(0.1)}), device.put({1}, {0}), clip);
  }
  testing::TestDevice device;
  std::vector<UpdatedRange> ranges{{device.filled({5}, 1), device.filled({5}, 2)},
                                   {device.filled({3}, 1), device.filled({3}, 4)}};
  Optimizer optimizer;
};

TEST_CASE("An optimizer of ranges updates all of them, and zeroes only their gradients", "[nn]") {
  TwoRanges sgd({.momentum = 0.5});
  REQUIRE(sgd.optimizer.state().size() == 1);
  CHECK(sgd.optimizer.state()[0].name == "momentum");
  REQUIRE(sgd.optimizer.state()[0].ranges.size() == 2);
  sgd.step(0);
  sgd.step(1);  // v = 2, 3 and 4, 6
  CHECK(relative_error(sgd.ranges[0].values.to_host(), Values(5, Real(0.5))) <=
        testing::kTolerance);
  for (const Real value : sgd.ranges[1].values.to_host()) CHECK(std::abs(value) <= 1e-6);
  CHECK(sgd.optimizer.state()[0].ranges[1].to_host() == Values(3, 6));
  sgd.optimizer.zero_gradients();
  for (const UpdatedRange& range : sgd.ranges) {
    for (const Real gradient : range.gradients.to_host()) CHECK(gradient == 0);
  }

  TwoRanges adam({.kind = OptimizerKind::adam});
  REQUIRE(adam.optimizer.state().size() == 2);
  CHECK(adam.optimizer.state()[0].name == "exp_avg");
  CHECK(adam.optimizer.state()[1].name == "exp_avg_sq");
  adam.step(0);  // Adam's first step is as long as the learning rate, but for eps
  CHECK(relative_error(adam.ranges[0].values.to_host(), Values(5, Real(0.9))) <= 1e-6);
  CHECK(relative_error(adam.ranges[1].values.to_host(), Values(3, Real(0.9))) <= 1e-6);
  CHECK(adam.optimizer.state()[1].ranges[1].elements() == 3);
}

TEST_CASE("A gradient that is not finite in one range stops all of them", "[nn]") {
  for (const OptimizerKind kind : {OptimizerKind::sgd, OptimizerKind::adam}) {
    for (const size_t bad : {size_t{0}, size_t{1}}) {
      TwoRanges run({.kind = kind});
      run.ranges[bad].gradients.range(2, {1}).copy_from_host(
          {std::numeric_limits<Real>::infinity()});
      run.step(4);
      CHECK(run.optimizer.health().to_host()[0].failed_step == 4);
      CHECK(run.ranges[0].values.to_host() == Values(5, 1));
      CHECK(run.ranges[1].values.to_host() == Values(3, 1));
    }
  }
}

TEST_CASE("Ranges are clipped by the norm of all of them, and of what others add", "[nn]") {
  TwoRanges run({});  // the squares of the gradients: 5 * 4 + 3 * 16 = 68
  const ClipByNorm off(run.device.stream, run.ranges, 0);
  off();
  CHECK(run.ranges[0].gradients.to_host() == Values(5, 2));
  double found = 0;
  const ClipByNorm clip(run.device.stream, run.ranges, 1, [&](const Tensor& squares) {
    CHECK(squares.elements() == 1);
    found = double(squares.to_host()[0]);
    run.device.kernels().add(run.device.stream, run.device.put({1}, {32}), squares);
  });
  clip();
  CHECK(found == Approx(68));  // and 32 of others: a norm of 10
  CHECK(relative_error(run.ranges[0].gradients.to_host(), Values(5, Real(2 / 10.000001))) <=
        testing::kTolerance);
  CHECK(relative_error(run.ranges[1].gradients.to_host(), Values(3, Real(4 / 10.000001))) <=
        testing::kTolerance);
}

TEST_CASE("Scaled gradients are divided by the scale before they are clipped", "[nn][sixteen]") {
  TwoRanges plain({}), scaled({.growth_interval = 9});
  for (const UpdatedRange& range : scaled.ranges) {
    scaled.device.kernels().scale(scaled.device.stream, 65536, range.gradients);
  }
  plain.step(ClipByNorm(plain.device.stream, plain.ranges, 1));
  scaled.step(ClipByNorm(scaled.device.stream, scaled.ranges, 1));
  CHECK(plain.ranges[0].values.to_host() != Values(5, 1));
  for (const size_t range : {size_t{0}, size_t{1}}) {
    CHECK(scaled.ranges[range].values.to_host() == plain.ranges[range].values.to_host());
  }
}

TEST_CASE("The seed network learns 32 random samples by heart", "[nn][row15]") {
  TestNetwork net({.kind = ModelKind::seed});
  const bool both = sizeof(Real) == 8 || testing::full_campaign();  // the double build proves more
  const bool adam = both && GENERATE(false, true);
  const Optimizer optimizer(net.parameters, adam ? OptimizerRule{.kind = OptimizerKind::adam}
                                                 : OptimizerRule{.momentum = 0.9});
  std::vector<int32_t> labels;
  for (int32_t i = 0; i < 32; ++i) labels.push_back(i * 7 % 10);
  const LabelTensor expected = net.device.labels(labels);
  Real loss = 0;
  int64_t step = 0;
  for (; step < 400; ++step) {
    net.context.state().copy_from_host(
        {{.step = step, .learning_rate = Real(adam ? 0.003 : 0.1), .loss_weight = Real(1) / 32}});
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
