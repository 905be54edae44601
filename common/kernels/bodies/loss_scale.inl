#pragma once
// The scale of the loss, for gradients in fp16: torch.amp.GradScaler's rule.

#include <cmath>

#include "common/kernels/bodies/elementwise.inl"

namespace lockstep::bodies {

struct ScaleLoss {
  const Health* health;
  Real* x;
  using Arrays = Members<&ScaleLoss::x>;
  LOCKSTEP_BODY Scale prepared() const { return {health->scale, x}; }
  LOCKSTEP_BODY void operator()(int64_t i) const { x[i] *= health->scale; }
};

/// A scale is a power of two: no digit changes.
struct Unscale {
  const Health* health;
  Real* x;
  using Arrays = Members<&Unscale::x>;
  LOCKSTEP_BODY Scale prepared() const { return {1 / health->scale, x}; }
  LOCKSTEP_BODY void operator()(int64_t i) const { x[i] *= 1 / health->scale; }
};

/// "Is there an i with found(i)?", then once, if so, report().
struct FindOverflow {
  const StepState* state;
  const Real* x;
  Health* health;
  using Arrays = Members<&FindOverflow::x>;
  LOCKSTEP_BODY bool found(int64_t i) const { return !(x[i] - x[i] == 0); }  // NaN, inf: NaN
  LOCKSTEP_BODY void report() const { health->skipped_step = state->step; }
};

/// One call.
struct UpdateScale {
  const StepState* state;
  int64_t growth_interval;
  Health* health;
  LOCKSTEP_BODY void operator()(int64_t /*i*/) const {
    if (health->skipped_step == state->step) {
      health->scale /= 2;
      health->good_steps = 0;
      ++health->skipped;
    } else if (++health->good_steps == growth_interval) {
      const Real twice = 2 * health->scale;
      if (twice - twice == 0) health->scale = twice;  // not infinite
      health->good_steps = 0;
    }
  }
};

}  // namespace lockstep::bodies
