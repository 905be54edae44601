#include "common/nn/layers.h"

#include "common/core/error.h"
#include "common/nn/init.h"

namespace lockstep {
namespace {

void require_features(const std::string& layer, const AnyTensor& x, int64_t features) {
  require(x.shape().axes() == 2, "{}: input {} is not [batch, features]", layer, x.shape().text());
  require_equal(x.shape()[1], features, layer + ": features of input " + x.shape().text());
}

void require_images(const std::string& layer, const AnyTensor& x) {
  require(x.shape().axes() == 4, "{}: input {} is not [batch, height, width, channels]", layer,
          x.shape().text());
}

}  // namespace

// --- Conv2d ------------------------------------------------------------------------------------

Conv2d::Conv2d(int64_t in_channels, int64_t out_channels, Options options)
    : in_channels_(in_channels),
      out_channels_(out_channels),
      options_(options),
      weight_(add_parameter("weight", ParameterKind::conv_weight,
                            {out_channels, options.kernel, options.kernel, in_channels},
                            in_channels * options.kernel * options.kernel)),
      bias_(add_parameter("bias", ParameterKind::bias, {out_channels},
                          in_channels * options.kernel * options.kernel)) {}

Window2d Conv2d::window(const Shape& x) const {
  return make_window(name(), x, in_channels_, out_channels_, options_.kernel, options_.stride,
                     options_.padding);
}

AnyTensor Conv2d::forward(const AnyTensor& x, Context& context) {
  return convolve(x, bias_.value, context);
}

AnyTensor Conv2d::product(const AnyTensor& x, Context& context) {
  const Tensor no_bias = context.empty({out_channels_});
  context.kernels().fill(context.stream(), 0, no_bias);
  return convolve(x, no_bias, context);
}

void Conv2d::add_bias(const AnyTensor& y, Context& context) {
  context.kernels().add_bias(context.stream(), bias_.value, /*relu=*/false, y);
}

AnyTensor Conv2d::convolve(const AnyTensor& x, const Tensor& bias, Context& context) {
  const Window2d g = window(x.shape());
  AnyTensor y = context.activation(g.output());
  context.kernels().conv2d(context.stream(), g, x, weight_.in_products(), bias, y);
  context.add_flops(g.flops());
  context.save(*this, {.tensors = {x}});
  return y;
}

AnyTensor Conv2d::backward(const AnyTensor& dy, Context& context) {
  const AnyTensor x = context.take(*this).tensors[0];
  const Window2d g = window(x.shape());
  Kernels& kernels = context.kernels();
  kernels.conv2d_backward_parameters(context.stream(), g, x, dy, weight_.grad, bias_.grad);
  gradient_written(bias_, context);
  gradient_written(weight_, context);
  context.add_flops(input_gradient_ ? 2 * g.flops() : g.flops());
  if (!input_gradient_) return {};
  AnyTensor dx = context.activation(g.input());
  kernels.conv2d_backward_input(context.stream(), g, dy, weight_.in_products(), dx);
  return dx;
}

// --- Linear ------------------------------------------------------------------------------------

Linear::Linear(int64_t in_features, int64_t out_features, Activation activation)
    : in_features_(in_features),
      out_features_(out_features),
      activation_(activation),
      weight_(add_parameter("weight", ParameterKind::linear_weight, {out_features, in_features},
                            in_features)),
      bias_(add_parameter("bias", ParameterKind::bias, {out_features}, in_features)) {}

AnyTensor Linear::forward(const AnyTensor& x, Context& context) {
  AnyTensor y = product(x, context);
  add_bias(y, context);
  return y;
}

AnyTensor Linear::product(const AnyTensor& x, Context& context) {
  require_features(name(), x, in_features_);
  const int64_t n = x.shape()[0];
  AnyTensor y = context.activation({n, out_features_});
  const MatMul xw{.m = n,
                  .n = out_features_,
                  .k = in_features_,
                  .transpose_a = false,
                  .transpose_b = true,
                  .accumulate = false};
  context.kernels().matmul(context.stream(), xw, x, weight_.in_products(), y);  // y = x W^T
  context.add_flops(2.0 * n * in_features_ * out_features_);
  const bool relu = activation_ == Activation::relu;
  context.save(*this, {.tensors = relu ? std::vector<AnyTensor>{x, y} : std::vector<AnyTensor>{x}});
  return y;
}

void Linear::add_bias(const AnyTensor& y, Context& context) {
  const bool relu = activation_ == Activation::relu;
  context.kernels().add_bias(context.stream(), bias_.value, relu, y);
}

AnyTensor Linear::backward(const AnyTensor& dy, Context& context) {
  const Context::Saved saved = context.take(*this);
  const AnyTensor& x = saved.tensors[0];
  const int64_t n = x.shape()[0];
  Kernels& kernels = context.kernels();
  const Stream stream = context.stream();
  AnyTensor dz = dy;
  if (activation_ == Activation::relu) {
    dz = context.activation(dy.shape());
    kernels.relu_backward(stream, saved.tensors[1], dy, dz);
  }
  kernels.add_column_sums(stream, dz, bias_.grad);
  gradient_written(bias_, context);
  const MatMul weights{.m = out_features_,
                       .n = in_features_,
                       .k = n,
                       .transpose_a = true,
                       .transpose_b = false,
                       .accumulate = true};
  kernels.matmul(stream, weights, dz, x, weight_.grad);  // dW += dz^T x
  gradient_written(weight_, context);
  const double flops = 2.0 * n * in_features_ * out_features_;
  context.add_flops(input_gradient_ ? 2 * flops : flops);
  if (!input_gradient_) return {};
  AnyTensor dx = context.activation(x.shape());
  const MatMul inputs{.m = n,
                      .n = in_features_,
                      .k = out_features_,
                      .transpose_a = false,
                      .transpose_b = false,
                      .accumulate = false};
  kernels.matmul(stream, inputs, dz, weight_.in_products(), dx);  // dx = dz W
  return dx;
}

// --- Pooling -----------------------------------------------------------------------------------

MaxPool2d::MaxPool2d(int64_t kernel, Activation activation, int64_t stride)
    : kernel_(kernel), stride_(stride == 0 ? kernel : stride), activation_(activation) {
  require(kernel >= 1, "MaxPool2d: kernel {} is not 1 or larger", kernel);
}

AnyTensor MaxPool2d::forward(const AnyTensor& x, Context& context) {
  require_images(name(), x);
  const int64_t channels = x.shape()[3];
  const Window2d g = make_window(name(), x.shape(), channels, channels, kernel_, stride_, 0);
  AnyTensor y = context.activation(g.output());
  const Positions where = context.positions(g.output());
  context.kernels().max_pool2d(context.stream(), g, activation_ == Activation::relu, x, y, where);
  context.save(*this, {.positions = where, .shape = x.shape()});
  return y;
}

AnyTensor MaxPool2d::backward(const AnyTensor& dy, Context& context) {
  const Context::Saved saved = context.take(*this);
  const int64_t channels = dy.shape()[3];
  const Window2d g = make_window(name(), saved.shape, channels, channels, kernel_, stride_, 0);
  AnyTensor dx = context.activation(g.input());
  context.kernels().max_pool2d_backward(context.stream(), g, dy, saved.positions, dx);
  return dx;
}

AnyTensor AdaptiveAvgPool2d::forward(const AnyTensor& x, Context& context) {
  require_images(name(), x);
  AnyTensor y = context.activation({x.shape()[0], height_, width_, x.shape()[3]});
  context.kernels().adaptive_avg_pool2d(context.stream(), x, y);
  context.save(*this, {.shape = x.shape()});
  return y;
}

AnyTensor AdaptiveAvgPool2d::backward(const AnyTensor& dy, Context& context) {
  AnyTensor dx = context.activation(context.take(*this).shape);
  context.kernels().adaptive_avg_pool2d_backward(context.stream(), dy, dx);
  return dx;
}

// --- ReLU, dropout, flatten, log-softmax -------------------------------------------------------

AnyTensor Relu::forward(const AnyTensor& x, Context& context) {
  AnyTensor y = context.activation(x.shape());
  context.kernels().relu(context.stream(), x, y);
  context.save(*this, {.tensors = {y}});
  return y;
}

AnyTensor Relu::backward(const AnyTensor& dy, Context& context) {
  const AnyTensor y = context.take(*this).tensors[0];
  AnyTensor dx = context.activation(dy.shape());
  context.kernels().relu_backward(context.stream(), y, dy, dx);
  return dx;
}

Dropout::Dropout(Real probability, uint32_t seed, bool whole_channels)
    : probability_(probability), seed_(seed), whole_channels_(whole_channels) {
  require(probability >= 0 && probability < 1,
          "Dropout: probability {} is not within 0 to 1, 1 excluded", probability);
}

AnyTensor Dropout::masked_view(const AnyTensor& x) const {
  const Shape& shape = x.shape();
  return whole_channels_ ? x : x.reshaped({shape[0], shape.row_elements()});
}

AnyTensor Dropout::forward(const AnyTensor& x, Context& context) {
  if (!context.facts.training) return x;
  const AnyTensor in = masked_view(x);
  const int64_t decisions = in.shape()[in.shape().axes() - 1];
  AnyTensor mask = context.activation({x.shape()[0], decisions});
  AnyTensor y = context.activation(x.shape());
  const DropoutKey key{.seed = seed_,
                       .layer = hash_name(name()),
                       .first_sample = context.facts.first_sample,
                       .first_feature = first_feature_};
  context.kernels().dropout_mask(context.stream(), context.state(), key, probability_, mask);
  context.kernels().apply_mask(context.stream(), in, mask, masked_view(y));
  context.save(*this, {.tensors = {mask}});
  return y;
}

AnyTensor Dropout::backward(const AnyTensor& dy, Context& context) {
  const AnyTensor mask = context.take(*this).tensors[0];
  AnyTensor dx = context.activation(dy.shape());
  context.kernels().apply_mask(context.stream(), masked_view(dy), mask, masked_view(dx));
  return dx;
}

AnyTensor Flatten::forward(const AnyTensor& x, Context& context) {
  require_images(name(), x);
  AnyTensor y = context.activation({x.shape()[0], x.shape().row_elements()});
  context.kernels().to_channels_first(context.stream(), x, y);
  context.save(*this, {.shape = x.shape()});
  return y;
}

AnyTensor Flatten::backward(const AnyTensor& dy, Context& context) {
  const Shape shape = context.take(*this).shape;
  if (!dy.defined()) return {};  // the layer after it was told to skip_input_gradient()
  AnyTensor dx = context.activation(shape);
  context.kernels().to_channels_last(context.stream(), dy, dx);
  return dx;
}

AnyTensor LogSoftmax::forward(const AnyTensor& x, Context& context) {
  const Tensor y = context.empty(x.shape());
  context.kernels().log_softmax(context.stream(), x, y);
  context.save(*this, {.tensors = {y}});
  return y;
}

AnyTensor LogSoftmax::backward(const AnyTensor& dy, Context& context) {
  const Tensor y = context.take(*this).tensors[0];
  AnyTensor dx = context.activation(y.shape());
  context.kernels().log_softmax_backward(context.stream(), y, dy, dx);
  return dx;
}

}  // namespace lockstep
