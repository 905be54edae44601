#pragma once
// A training pass without samples, as made by a rank whose part of a batch is empty.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "common/core/error.h"
#include "common/nn/batch_norm.h"
#include "common/nn/init.h"
#include "common/nn/models.h"

namespace lockstep::testing {

/// Whether all values are +0, to the bit.
inline bool all_zero(const std::vector<Real>& values) {
  return std::all_of(values.begin(), values.end(),
                     [](Real value) { return value == 0 && !std::signbit(value); });
}

/// Throws BadInput if a pass of no samples through this network changes anything, or does not reach
/// every layer.
inline void require_empty_pass(Stream stream, const ModelOptions& options) {
  const Model model = make_model(options);
  const FlatParameters parameters(*model.network, stream);
  initialize(parameters, Initializer::kaiming_uniform, 1);
  size_t hooks = 0;
  for (Parameter* p : parameters.parameters()) {
    p->on_gradient_ready = [&hooks](Parameter&) { ++hooks; };
  }
  const std::vector<Real> running = parameters.buffer_values().to_host();
  Context context(stream);
  context.state().copy_from_host({{.loss_weight = Real(0.5)}});
  const Tensor loss = Tensor::from_host(stream, {1}, {0});
  const Shape shape{0, options.height, options.width_pixels, options.channels};
  const LabelTensor labels = LabelTensor::empty(stream, {0});

  const AnyTensor scores = model.network->forward(Tensor::empty(stream, shape), context);
  model.loss->forward(scores, labels, loss, context);
  model.network->backward(model.loss->backward(labels, context), context);
  require_equal(scores.shape().text(), Shape{0, options.classes}.text(), "scores");
  require(all_zero(loss.to_host()), "the loss is not 0");
  require(all_zero(parameters.gradients().to_host()), "there are gradients");
  require_equal(hooks, parameters.parameters().size(), "gradients that are ready");
  require(parameters.buffer_values().to_host() == running, "the running statistics have moved");
  for (const BatchNorm2d* norm : batch_norms(*model.network)) {
    require_equal(norm->batches_tracked(), int64_t{0}, norm->name() + ": batches tracked");
  }
}

/// The networks of the stages, small.
inline std::vector<ModelOptions> networks_for_empty_passes() {
  return {{.kind = ModelKind::seed, .dropout = true},
          {.kind = ModelKind::seed_bn, .dropout = true},
          {.kind = ModelKind::resnet18, .width = 8}};
}

}  // namespace lockstep::testing
