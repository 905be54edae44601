#pragma once
// The part of the catalogue (kernels.h) that works on flat buffers of gradients and weights: the
// watch over non-finite numbers, clipping, and the optimizers' updates.

#include "common/core/tensor.h"
#include "common/kernels/step_state.h"

namespace lockstep {

using StepStateTensor = BasicTensor<StepState>;
using HealthTensor = BasicTensor<Health>;
using CountTensor = BasicTensor<int64_t>;

/// Whose numbers a flat buffer holds, and which of them an update changes.
struct Owners {
  BasicTensor<Stretch> stretches{};  // all of the buffer's
  Tensor marks{};                    // [parameters]: above 0 for one that has a gradient
};

class OptimizerKernels {
 public:
  virtual ~OptimizerKernels() = default;

  /// Writes state.step into `health` if any element of x is NaN or infinite and `health` was sound.
  virtual void check_finite(Stream, const StepStateTensor& state, const Tensor& x,
                            const HealthTensor& health) = 0;
  /// x[0] becomes NaN once `health` has failed, else it stays: a number that ranks add up then
  /// tells all of them.
  virtual void poison(Stream, const HealthTensor& health, const Tensor& x) = 0;

  // These two together are torch.nn.utils.clip_grad_norm_.
  /// sums[0] = sum over i of x[i]^2. sums [1 + ceil(n / kSumPart)]; the others become those of
  /// parts.
  virtual void sum_squares(Stream, const Tensor& x, const Tensor& sums) = 0;
  static constexpr int64_t kSumPart = 16384;
  /// x *= min(1, most / (norm + 1e-6)), where norm is the root of squares[0].
  virtual void clip_to_norm(Stream, Real most, const Tensor& squares, const Tensor& x) = 0;

  // One step over flat buffers, in one pass, at state.learning_rate; does nothing once `health` has
  // failed, and nothing to parameters without a gradient.
  /// As SgdRule says. `velocity` may be undefined when momentum is 0.
  virtual void sgd_update(Stream, const StepStateTensor& state, const HealthTensor& health,
                          const Owners& owners, SgdRule rule, const Tensor& gradient,
                          const Tensor& velocity, const Tensor& weight) = 0;
  /// Before the updates: t of AdamRule, `steps` [parameters], becomes one more for each parameter
  /// that has a gradient; of its `factors` [parameters,2] the first becomes lr / (1 - beta1^t), the
  /// second sqrt(1 - beta2^t).
  virtual void adam_count(Stream, const StepStateTensor& state, const HealthTensor& health,
                          const Tensor& marks, const AdamRule& rule, const CountTensor& steps,
                          const Tensor& factors) = 0;
  /// As AdamRule says, with these factors. `exp_avg` is m and `exp_avg_sq` is v: zeros at first.
  virtual void adam_update(Stream, const StepStateTensor& state, const HealthTensor& health,
                           const Owners& owners, const AdamRule& rule, const Tensor& factors,
                           const Tensor& gradient, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                           const Tensor& weight) = 0;
};

}  // namespace lockstep
