// Every layer, loss and network against central differences (row 11 of the test table).
//
// The double build proves it: step 1e-6, error at most 1e-6 of the tensor's largest gradient. The
// float build takes the layers, not the networks, through the same shapes with a step of 0.001,
// where rounding costs some 1e-7 / 0.001: for the engine and the sanitizers of that build.
//
// A central difference is blind at a kink. Inputs of ReLU and max-pooling therefore keep their
// distance from 0 and from each other.

#include <functional>
#include <numeric>

#include "common/nn/batch_norm.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/residual.h"
#include "tests/support/catch.h"
#include "tests/support/nn_test_support.h"

namespace lockstep {
namespace {

using testing::kDouble;
using testing::random_values;
using testing::spread_values;
using testing::TestDevice;
using Values = std::vector<Real>;

constexpr Real kStep = kDouble ? Real(1e-6) : Real(1e-3);
constexpr double kBound = kDouble ? 1e-6 : 5e-3;
constexpr Real kGap = Real(0.05);  // between the inputs of functions with kinks

/// (loss(v + step) - loss(v - step)) / (2 step) for element `i` of `variable`.
double central_difference(const std::function<double()>& loss, const Tensor& variable, int64_t i) {
  const Tensor element = variable.range(i, {1});
  const Real value = element.to_host()[0], above = value + kStep, below = value - kStep;
  element.copy_from_host({above});
  const double high = loss();
  element.copy_from_host({below});
  const double low = loss();
  element.copy_from_host({value});
  return (high - low) / (double(above) - double(below));
}

/// The largest difference between `gradient` and central differences of `loss` over every
/// `stride`-th element, relative to the largest element of `gradient`.
double gradient_error(const std::function<double()>& loss, const Tensor& variable,
                      const Values& gradient, int64_t stride = 1) {
  double worst = 0, scale = 0;
  for (const Real g : gradient) scale = std::max(scale, std::abs(double(g)));
  for (int64_t i = 0; i < variable.elements(); i += stride) {
    const double error = std::abs(central_difference(loss, variable, i) - double(gradient[i]));
    if (std::isnan(error)) return error;
    worst = std::max(worst, error);
  }
  return worst / scale;
}

/// Whether batch normalisation subtracts this bias again, so that its true gradient is 0: that of
/// conv1 where there is a bn1 beside it (the shortcut's conv3 has none).
bool cancelled_by_norm(std::string name, const FlatParameters& parameters) {
  const size_t conv = name.rfind("conv");
  if (conv == name.npos || !name.ends_with(".bias")) return false;
  name.replace(conv, 4, "bn");
  return std::ranges::any_of(parameters.parameters(),
                             [&](const Parameter* p) { return p->name == name; });
}

/// Checks the gradients that backward left in `parameters`, some `samples` elements of each.
void check_parameters(const std::function<double()>& loss, const FlatParameters& parameters,
                      int64_t samples) {
  for (const Parameter* p : parameters.parameters()) {
    const Values gradient = p->grad.to_host();
    INFO(p->name);
    if (cancelled_by_norm(p->name, parameters)) {  // what is left of it is rounding
      for (const Real g : gradient) CHECK(std::abs(g) <= (kDouble ? 1e-12 : 1e-4));
      CHECK(std::abs(central_difference(loss, p->value, 0)) <= (kDouble ? 1e-8 : 1e-2));
    } else {
      const int64_t stride = std::max<int64_t>(1, p->shape.elements() / samples);
      CHECK(gradient_error(loss, p->value, gradient, stride) <= kBound);
    }
  }
}

/// A layer with random parameters, and the loss "sum of weights times outputs" over it.
class LayerUnderTest {
 public:
  LayerUnderTest(std::unique_ptr<Module> layer, const Shape& shape, const Values& x)
      : layer_(std::move(layer)), parameters_(*layer_, device_.stream), x_(device_.put(shape, x)) {
    layer_->set_name("layer");
    uint32_t seed = 100;
    for (const Parameter* p : parameters_.parameters()) {
      p->value.copy_from_host(random_values(p->shape, ++seed));
    }
    context_.state().copy_from_host({{.step = 3, .first_position = 5}});  // of dropout's mask
    const Tensor y = layer_->forward(x_, context_);
    context_.clear();
    weights_ = random_values(y.shape(), 99);
    slope_ = device_.put(y.shape(), weights_);
  }

  double loss() {
    const Values y = layer_->forward(x_, context_).to_host();
    context_.clear();
    return std::inner_product(y.begin(), y.end(), weights_.begin(), 0.0);
  }
  Tensor backward() {
    layer_->forward(x_, context_);
    return layer_->backward(slope_, context_);
  }
  void check() {
    const auto loss = [this] { return this->loss(); };
    CHECK(gradient_error(loss, x_, backward().to_host()) <= kBound);
    check_parameters(loss, parameters_, std::numeric_limits<int64_t>::max());
  }
  const FlatParameters& parameters() const { return parameters_; }
  Module& layer() { return *layer_; }
  const TestDevice& device() const { return device_; }

 private:
  TestDevice device_;
  std::unique_ptr<Module> layer_;
  FlatParameters parameters_;
  Tensor x_;
  Context context_{device_.stream};
  Values weights_;
  Tensor slope_;
};

void check_layer(std::unique_ptr<Module> layer, const Shape& shape, const Values& x) {
  INFO("input " << shape.text());
  LayerUnderTest(std::move(layer), shape, x).check();
}

template <class M, class... Args>
void check_smooth(const Shape& shape, Args... args) {
  check_layer(std::make_unique<M>(args...), shape, random_values(shape, 1));
}

template <class M, class... Args>
void check_kinked(const Shape& shape, Args... args) {
  check_layer(std::make_unique<M>(args...), shape, spread_values(shape, kGap, 1));
}

TEST_CASE("Gradients of convolutions", "[gradients][row11]") {
  const auto check = [](const Shape& shape, int64_t out, Conv2d::Options options) {
    INFO("kernel " << options.kernel << " stride " << options.stride << " padding "
                   << options.padding);
    check_smooth<Conv2d>(shape, shape[3], out, options);
  };
  check({2, 5, 4, 1}, 2, {.kernel = 1});
  check({1, 7, 5, 1}, 3, {.kernel = 5});
  check({2, 5, 7, 3}, 2, {.kernel = 3, .padding = 1});
  check({1, 6, 5, 2}, 17, {.kernel = 3, .stride = 2, .padding = 1});
  check({2, 5, 3, 4}, 5, {.kernel = 1, .stride = 2});
  check({1, 4, 4, 2}, 3, {.kernel = 4, .stride = 3, .padding = 2});
}

TEST_CASE("Gradients of linear layers, with and without a fused ReLU", "[gradients][row11]") {
  check_smooth<Linear>({3, 7}, 7, 5);
  check_smooth<Linear>({1, 1}, 1, 1);
  check_smooth<Linear>({4, 6}, 6, 9, Activation::relu);
}

TEST_CASE("Gradients of max-pooling", "[gradients][row11]") {
  const auto check = [](const Shape& shape, int64_t kernel, int64_t stride) {
    INFO("kernel " << kernel << " stride " << stride);
    check_kinked<MaxPool2d>(shape, kernel, Activation::none, stride);
    check_kinked<MaxPool2d>(shape, kernel, Activation::relu, stride);
  };
  check({2, 4, 6, 3}, 2, 0);
  check({1, 7, 5, 3}, 2, 2);
  check({2, 7, 6, 2}, 3, 2);
  check({1, 5, 4, 2}, 2, 1);
}

TEST_CASE("Gradients of adaptive average pooling", "[gradients][row11]") {
  check_smooth<AdaptiveAvgPool2d>({2, 4, 3, 3}, 1, 1);
  check_smooth<AdaptiveAvgPool2d>({1, 7, 5, 2}, 3, 2);
  check_smooth<AdaptiveAvgPool2d>({1, 4, 4, 2}, 4, 4);
}

/// relu(bn(x) + x): the end of a residual block whose shortcut is its input.
class NormAddRelu final : public Module {
 public:
  explicit NormAddRelu(int64_t channels)
      : norm_(add_module("bn", std::make_unique<BatchNorm2d>(channels))) {}
  AnyTensor forward(const AnyTensor& x, Context& context) override {
    Tensor y = norm_.forward_add_relu(x, x, context);
    context.save(*this, {.tensors = {y}});
    return y;
  }
  AnyTensor backward(const AnyTensor& dy, Context& context) override {
    Tensor dsum = context.empty(dy.shape());
    const Tensor y = context.take(*this).tensors[0];
    context.kernels().relu_backward(context.stream(), y, dy, dsum);
    Tensor dx = norm_.backward(dsum, context);
    context.kernels().add(context.stream(), dsum, dx);
    return dx;
  }

 private:
  BatchNorm2d& norm_;
};

TEST_CASE("Gradients of batch normalisation", "[gradients][row11]") {
  check_smooth<BatchNorm2d>({3, 3, 5, 4}, 4);
  check_smooth<BatchNorm2d>({4, 1, 1, 3}, 3);
  check_kinked<BatchNorm2d>({2, 3, 4, 3}, 3, Activation::relu);
  check_kinked<NormAddRelu>({2, 3, 4, 3}, 3);
}

TEST_CASE("Gradients of ReLU, flatten and log-softmax", "[gradients][row11]") {
  check_kinked<Relu>({2, 3, 5, 2});
  check_smooth<Flatten>({2, 3, 5, 4});
  check_smooth<LogSoftmax>({4, 6});
}

TEST_CASE("Gradients of dropout under a fixed mask", "[gradients][row11]") {
  check_smooth<Dropout>({3, 17}, Real(0.5), 1u);
  check_smooth<Dropout>({2, 3, 2, 5}, Real(0.3), 1u);
  check_smooth<Dropout2d>({4, 2, 3, 5}, Real(0.5), 1u);
}

TEST_CASE("Gradients through a sequence of layers", "[gradients][row11]") {
  auto sequence = std::make_unique<Sequential>();
  sequence->add("conv", std::make_unique<Conv2d>(2, 3, Conv2d::Options{.kernel = 3}))
      .add("bn", std::make_unique<BatchNorm2d>(3))
      .add("gap", std::make_unique<AdaptiveAvgPool2d>(2, 2))
      .add("flatten", std::make_unique<Flatten>())
      .add("fc", std::make_unique<Linear>(12, 4))
      .add("log_softmax", std::make_unique<LogSoftmax>());
  const Shape shape{3, 6, 5, 2};
  check_layer(std::move(sequence), shape, random_values(shape, 1));
}

TEST_CASE("Backward adds to the gradients of parameters", "[gradients][row11]") {
  const Shape shape{2, 6, 6, 2};
  LayerUnderTest residual(std::make_unique<Residual>(2, 3, 2), shape, random_values(shape, 1));
  residual.backward();
  const Values once = residual.parameters().gradients().to_host();
  residual.backward();
  Values twice = once;
  for (Real& g : twice) g *= 2;
  CHECK(std::ranges::any_of(once, [](Real g) { return g != 0; }));
  CHECK(residual.parameters().gradients().to_host() == twice);
  residual.parameters().zero_gradients();
  CHECK(residual.parameters().gradients().to_host() == Values(once.size(), 0));

  const Shape rows{3, 4};
  LayerUnderTest linear(std::make_unique<Linear>(4, 2), rows, random_values(rows, 1));
  linear.backward();
  const Values weight = linear.parameters().parameters()[0]->grad.to_host();
  linear.backward();
  for (size_t i = 0; i < weight.size(); ++i) {
    CHECK(linear.parameters().parameters()[0]->grad.to_host()[i] == Approx(2 * weight[i]));
  }
}

TEST_CASE("A first layer that skips its input's gradient still has those of its parameters",
          "[gradients][row11]") {
  const auto check = [](const Shape& shape, const auto& make) {
    LayerUnderTest full(make(), shape, random_values(shape, 1));
    CHECK(full.backward().shape() == shape);
    LayerUnderTest first(make(), shape, random_values(shape, 1));
    first.layer().skip_input_gradient();
    CHECK_FALSE(first.backward().defined());
    CHECK(first.parameters().gradients().to_host() == full.parameters().gradients().to_host());
  };
  check({2, 5, 5, 2}, [] { return std::make_unique<Conv2d>(2, 3, Conv2d::Options{.kernel = 3}); });
  check({2, 5}, [] { return std::make_unique<Linear>(5, 3); });
  check({2, 5}, [] {
    auto sequence = std::make_unique<Sequential>();
    sequence->add("fc1", std::make_unique<Linear>(5, 4)).add("fc2", std::make_unique<Linear>(4, 3));
    return sequence;
  });
}

TEST_CASE("Gradients of the losses", "[gradients][row11]") {
  const TestDevice d;
  const Shape shape{5, 4};
  const LabelTensor labels = d.labels({0, 3, 1, 1, 2});
  for (const bool cross_entropy : {false, true}) {
    const std::unique_ptr<Loss> loss = cross_entropy ? make_cross_entropy_loss() : make_nll_loss();
    Context context(d.stream);
    context.state().copy_from_host({{.loss_weight = Real(0.25)}});
    const Tensor scores = d.put(shape, random_values(shape, 1));
    const auto value = [&] {
      const Tensor sum = d.filled({1}, 0);
      loss->forward(scores, labels, sum, context);
      context.clear();
      return double(sum.to_host()[0]);
    };
    const Tensor sum = d.filled({1}, 0);
    loss->forward(scores, labels, sum, context);
    const Values scores_gradient = loss->backward(labels, context).to_host();
    INFO((cross_entropy ? "cross-entropy" : "NLL"));
    CHECK(gradient_error(value, scores, scores_gradient) <= kBound);
  }
}

#ifdef LOCKSTEP_DOUBLE

TEST_CASE("Gradients through residual blocks, with and without a convolution in the shortcut",
          "[gradients][row11]") {
  check_smooth<Residual>({2, 5, 5, 3}, 3, 3, 1);
  check_smooth<Residual>({2, 6, 5, 2}, 2, 3, 2);
  check_smooth<Residual>({2, 6, 5, 3}, 3, 3, 2);
  check_smooth<Residual>({2, 4, 4, 2}, 2, 3, 1);
}

/// A network, a batch of four, and its mean loss.
class NetworkUnderTest {
 public:
  explicit NetworkUnderTest(const ModelOptions& options)
      : model_(make_model(options)), parameters_(*model_.network, device_.stream) {
    initialize(parameters_, Initializer::kaiming_uniform, 1);
    const Shape shape{4, options.height, options.width_pixels, options.channels};
    images_ = device_.put(shape, random_values(shape, 2));
    labels_ = device_.labels({1, 9, 0, 4});
    context_.state().copy_from_host({{.loss_weight = Real(0.25)}});
  }

  double loss() {
    const Values loss = forward().to_host();
    context_.clear();
    return loss[0];
  }
  void check() {
    forward();
    const Tensor scores_gradient = model_.loss->backward(labels_, context_);
    CHECK_FALSE(model_.network->backward(scores_gradient, context_).defined());
    const auto loss = [this] { return this->loss(); };
    check_parameters(loss, parameters_, 5);
  }

 private:
  Tensor forward() {
    Tensor loss = device_.filled({1}, 0);
    model_.loss->forward(model_.network->forward(images_, context_), labels_, loss, context_);
    return loss;
  }
  TestDevice device_;
  Model model_;
  FlatParameters parameters_;
  Context context_{device_.stream};
  Tensor images_;
  LabelTensor labels_;
};

TEST_CASE("Gradients of the seed network and its batch-norm variant", "[gradients][row11]") {
  const bool dropout = GENERATE(false, true);
  NetworkUnderTest({.kind = ModelKind::seed, .dropout = dropout}).check();
  NetworkUnderTest({.kind = ModelKind::seed_bn, .dropout = dropout}).check();
}

TEST_CASE("Gradients of the seed network with a layer more", "[gradients][row11]") {
  NetworkUnderTest({.kind = ModelKind::seed_skip}).check();
}

TEST_CASE("Gradients of linear layers one after another", "[gradients][row11]") {
  NetworkUnderTest({.kind = ModelKind::mlp, .width = 3, .height = 12, .width_pixels = 13}).check();
}

TEST_CASE("Gradients of ResNet-18", "[gradients][row11]") {
  NetworkUnderTest({.kind = ModelKind::resnet18, .width = 2, .height = 12, .width_pixels = 13})
      .check();
}

#endif

}  // namespace
}  // namespace lockstep
