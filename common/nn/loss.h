#pragma once
// Losses. Each is the mean over the GLOBAL batch: a sample counts StepState::loss_weight, so that
// the losses and gradients of the parts of a batch simply add up.

#include <memory>

#include "common/nn/context.h"

namespace lockstep {

/// A loss over labels. Mirrors torch.nn.functional.
class Loss {
 public:
  virtual ~Loss() = default;
  /// Adds loss_weight * (sum of the samples' losses) to loss[0] and keeps what backward needs.
  virtual void forward(const AnyTensor& scores, const LabelTensor& labels, const Tensor& loss,
                       Context& context) = 0;
  /// The gradient of the scores, [N,K], times Context::loss_scale().
  virtual AnyTensor backward(const LabelTensor& labels, Context& context) = 0;
};

/// nll_loss: the network's last layer is a log-softmax.
std::unique_ptr<Loss> make_nll_loss();
/// cross_entropy: log-softmax and nll_loss in one; the network ends with plain scores.
std::unique_ptr<Loss> make_cross_entropy_loss();

}  // namespace lockstep
