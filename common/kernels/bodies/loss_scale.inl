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
};

/// A scale is a power of two: no digit changes.
struct Unscale {
  const Health* health;
  Real* x;
  using Arrays = Members<&Unscale::x>;
  LOCKSTEP_BODY Scale prepared() const { return {1 / health->scale, x}; }
};

/// "Is there an i with found(i)?", then once, if so, report().
struct FindOverflow {
  const StepState* state;
  const Real* x;
  Health* health;
  using Arrays = Members<&FindOverflow::x>;
  LOCKSTEP_BODY bool found(int64_t i) const { return !(x[i] - x[i] == 0); }  // NaN, inf: NaN
  LOCKSTEP_BODY void report() const {
    health->skips = 1;
    health->skipped_step = state->step;
  }
};

/// One call, at the end of a step. `skips` says whether a gradient has overflowed in the step. Then
/// the scale is halved, and the step counts as skipped. After `growth_interval` good steps, one
/// after another, the scale is doubled, unless it would be infinite. `good_steps` counts from the
/// last change of the scale, or from the last step that was skipped. The next step is not skipped
/// yet.
struct UpdateScale {
  int64_t growth_interval;
  Health* health;
  LOCKSTEP_BODY void operator()(int64_t /*i*/) const {
    Health now = *health;  // read at once: no load waits for a decision
    // [task 01.4] the scale of the loss
    const bool skipped = now.skips == 1;
    const Real twice = 2 * now.scale;
    now.good_steps = skipped ? 0 : now.good_steps + 1;
    now.skipped += skipped ? 1 : 0;
    if (skipped) now.scale /= 2;
    if (now.good_steps == growth_interval) {
      now.good_steps = 0;
      if (twice - twice == 0) now.scale = twice;  // not infinite
    }
    now.skips = 0;
    // [end 01.4]
    *health = now;
  }
};

}  // namespace lockstep::bodies
