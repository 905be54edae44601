#pragma once
// The optimizer and its learning rate.

#include "common/kernels/kernels.h"
#include "common/nn/parameter.h"

namespace lockstep {

/// Stochastic gradient descent over the flat buffers of one device, as torch.optim.SGD:
/// g += weight_decay w; v = momentum v + g (v starts at 0); w -= lr v. The learning rate comes from
/// StepState. Once the loss or a gradient was not finite, the weights stay as they are.
class Sgd {
 public:
  /// `parameters` must outlive the optimizer.
  Sgd(const FlatParameters& parameters, SgdRule rule);

  /// Zeroes the loss, too (FlatParameters::loss()).
  void zero_gradients() const { parameters_.zero_gradients(); }
  /// One update from the gradients. `loss` [1] is watched too.
  void step(const StepStateTensor& state, const Tensor& loss) const;

  const HealthTensor& health() const { return health_; }
  /// Flat like the parameters; undefined when momentum is 0.
  const Tensor& velocity() const { return velocity_; }

 private:
  const FlatParameters& parameters_;
  SgdRule rule_;
  Tensor velocity_;
  HealthTensor health_;
};

/// Scales all gradients together down to an L2 norm of `most`, as torch.nn.utils.clip_grad_norm_
/// does. Call it between backward and the optimizer's step.
class ClipByNorm {
 public:
  /// 0: calls do nothing. `parameters` must outlive this.
  ClipByNorm(const FlatParameters& parameters, double most);
  void operator()() const;
  /// [0]: the norm that the last call found; undefined if calls do nothing.
  const Tensor& norm() const { return norm_; }

 private:
  const FlatParameters& parameters_;
  Real most_;
  Tensor norm_;
};

/// Step schedule with linear warm-up (Goyal et al., arXiv 1706.02677, section 2.2): over the first
/// `warmup_steps` steps the rate climbs from `warmup_from` to `base`; from then on it is multiplied
/// by `gamma` every `decay_steps` steps (0: never), as torch.optim.lr_scheduler.StepLR.
struct LearningRateSchedule {
  double base = 0.1;
  double warmup_from = 0;
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;
  double gamma = 0.1;

  /// The rate of step `step`, counted from 0.
  double at(int64_t step) const;
};

}  // namespace lockstep
