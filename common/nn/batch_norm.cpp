#include "common/nn/batch_norm.h"

#include "common/core/error.h"

namespace lockstep {
namespace {

constexpr Real kEps = Real(1e-5);
constexpr Real kMomentum = Real(0.1);

}  // namespace

BatchNorm2d::BatchNorm2d(int64_t channels, Activation activation)
    : channels_(channels),
      activation_(activation),
      weight_(add_parameter("weight", ParameterKind::norm_weight, {channels}, channels)),
      bias_(add_parameter("bias", ParameterKind::norm_bias, {channels}, channels)),
      running_mean_(add_buffer("running_mean", {channels}, 0)),
      running_var_(add_buffer("running_var", {channels}, 1)) {}

Tensor BatchNorm2d::training_norm(const AnyTensor& x, Context& context) {
  Kernels& kernels = context.kernels();
  const Stream stream = context.stream();
  Tensor statistics = whole_ ? context.empty({2 * channels_ + 1}) : Tensor();
  if (whole_) kernels.batch_norm_statistics(stream, x, statistics);
  const int64_t mine = x.elements() / channels_;
  const Rows rows = whole_ ? whole_->merge(statistics, mine, *this, context) : rows_of(mine);
  require(rows != Rows::one,
          "{}: one value per channel (input {}) has no variance; train with a larger batch", name(),
          x.shape().text());
  const bool update =
      rows != Rows::none && context.facts.update_running && !context.facts.recompute;
  Tensor norm = context.empty({2 * channels_ + 1});
  const Real momentum = update ? kMomentum : 0;
  const Tensor &mean = running_mean_.value, &var = running_var_.value;
  if (whole_) {
    kernels.batch_norm_prepare(stream, statistics, kEps, momentum, mean, var, norm);
  } else {
    kernels.batch_norm_measure(stream, x, kEps, momentum, mean, var, norm);
  }
  if (update) context.on_host([this] { ++batches_tracked_; });
  return norm;
}

AnyTensor BatchNorm2d::normalize(const AnyTensor& x, const AnyTensor& skip, bool relu,
                                 Context& context) {
  require(x.shape().axes() == 4 && x.shape()[3] == channels_,
          "{}: input {} is not [batch, height, width, {}]", name(), x.shape().text(), channels_);
  Tensor norm;
  if (context.facts.training) {
    norm = training_norm(x, context);
  } else {
    norm = context.empty({2 * channels_});
    context.kernels().batch_norm_prepare_eval(context.stream(), running_mean_.value,
                                              running_var_.value, kEps, norm);
  }
  AnyTensor y = context.activation(x.shape());
  context.kernels().batch_norm(context.stream(), x, norm, weight_.value, bias_.value, skip, relu,
                               y);
  context.save(*this, {.tensors = {x, norm}});
  return y;
}

AnyTensor BatchNorm2d::forward(const AnyTensor& x, Context& context) {
  return normalize(x, AnyTensor(), activation_ == Activation::relu, context);
}

AnyTensor BatchNorm2d::forward_add_relu(const AnyTensor& x, const AnyTensor& skip,
                                        Context& context) {
  return normalize(x, skip, true, context);
}

AnyTensor BatchNorm2d::backward(const AnyTensor& dy, Context& context) {
  const Context::Saved saved = context.take(*this);
  const AnyTensor& x = saved.tensors[0];
  const Tensor norm = saved.tensors[1];
  const bool relu = activation_ == Activation::relu;
  Kernels& kernels = context.kernels();
  const Stream stream = context.stream();

  Tensor sums = context.empty({2, channels_});
  // Parameters take the local sums: these are added up later, when gradients are averaged over
  // devices.
  kernels.batch_norm_backward_sums(stream, x, dy, norm, weight_.value, bias_.value, relu, sums,
                                   weight_.grad, bias_.grad);
  gradient_written(bias_, context);
  gradient_written(weight_, context);
  if (whole_) whole_->merge_sums(sums, *this, context);
  AnyTensor dx = context.activation(x.shape());
  kernels.batch_norm_backward_input(stream, x, dy, norm, weight_.value, bias_.value, relu, sums,
                                    dx);
  return dx;
}

std::vector<BatchNorm2d*> batch_norms(Module& network) {
  std::vector<BatchNorm2d*> all;
  if (auto* norm = dynamic_cast<BatchNorm2d*>(&network)) all.push_back(norm);
  for (const auto& inner : network.children()) {
    for (BatchNorm2d* norm : batch_norms(*inner)) all.push_back(norm);
  }
  return all;
}

}  // namespace lockstep
