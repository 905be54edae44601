#pragma once
// The optimizer's pass over the flat buffers, and the watch over non-finite numbers.

#include <cmath>

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

/// Over parts of x: the sum of a part's squares.
struct SumSquares {
  const Real* x;
  int64_t count, part;
  Real* sums;
  template <class Team>
  LOCKSTEP_BODY void operator()(const Team& team, int64_t number) const {
    const int64_t first = number * part;
    const int64_t here = count - first < part ? count - first : part;
    const Real sum = team.sum(here, [=, *this](int64_t i) { return x[first + i] * x[first + i]; });
    team.leader([=, *this] { sums[number] = sum; });
  }
};

/// norm[0] from the sums after it.
struct NormOfParts {
  int64_t parts;
  Real* norm;
  template <class Team>
  LOCKSTEP_BODY void operator()(const Team& team, int64_t) const {
    const Real sum = team.sum(parts, [=, *this](int64_t i) { return norm[1 + i]; });
    team.leader([=, *this] { norm[0] = std::sqrt(sum); });
  }
};

struct ScaleToNorm {
  const Real* norm;
  Real most;
  Real* x;
  LOCKSTEP_BODY void operator()(int64_t i) const {
    const Real factor = most / (norm[0] + Real(1e-6));
    if (!(factor >= 1)) x[i] *= factor;  // a norm that is NaN shows in x
  }
};

/// torch.optim.SGD (SgdRule), for number i. Weight and velocity are read once and written once, the
/// gradient is only read. Without momentum there is no velocity.
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
    // [task 01.1] SGD with momentum
    Real direction = gradient[i] + rule.weight_decay * weight[i];
    if (kMomentum) direction = velocity[i] = rule.momentum * velocity[i] + direction;
    weight[i] -= state->learning_rate * direction;
    // [end 01.1]
  }
};

}  // namespace lockstep::bodies
