#pragma once
// The optimizer's pass over the flat buffers, and the watch over non-finite numbers.

#include "common/kernels/bodies/portable.h"

namespace lockstep::bodies {

/// "Is there an i with found(i)?", then once, if so, report().
struct CheckFinite {
  const StepState* state;
  const Real* x;
  Health* health;
  LOCKSTEP_BODY bool found(int64_t i) const { return !(x[i] - x[i] == 0); }  // NaN, inf: NaN
  LOCKSTEP_BODY void report() const {
    if (health->failed_step < 0) health->failed_step = state->step;
  }
};

/// torch.optim.SGD. Weight, gradient and velocity are read once and written once.
template <bool kMomentum>
struct SgdUpdate {
  const StepState* state;
  const Health* health;
  SgdRule rule;
  const Real* gradient;
  Real* velocity;
  Real* weight;
  /// False once training has failed: the weights stay as the last good step left them.
  LOCKSTEP_BODY bool enabled() const { return health->failed_step < 0; }
  LOCKSTEP_BODY void operator()(int64_t i) const {
    Real direction = gradient[i] + rule.weight_decay * weight[i];
    if (kMomentum) direction = velocity[i] = rule.momentum * velocity[i] + direction;
    weight[i] -= state->learning_rate * direction;
  }
};

}  // namespace lockstep::bodies
