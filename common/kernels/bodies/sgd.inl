#pragma once
// SGD's pass over the flat buffers, what clips gradients before it, and the watch over non-finite
// numbers.

#include <cmath>
#include <type_traits>

#include "common/kernels/bodies/elementwise.inl"

namespace lockstep::bodies {

/// "Is there an i with found(i)?", then once, if so, report().
struct CheckFinite {
  const StepState* state;
  const Real* x;
  Health* health;
  using Arrays = Members<&CheckFinite::x>;
  LOCKSTEP_BODY bool found(int64_t i) const { return !(x[i] - x[i] == 0); }  // NaN, inf: NaN
  LOCKSTEP_BODY void report() const {
    if (health->failed_step < 0) health->failed_step = state->step;
  }
};

/// x[0] becomes NaN where training has failed.
struct Poison {
  const Health* health;
  Real* x;
  LOCKSTEP_BODY bool enabled() const { return health->failed_step >= 0; }
  LOCKSTEP_BODY void operator()(int64_t i) const { x[i] = Real(NAN); }
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
    const Real sum = team.sum(x + first, here, [](Real value) { return value * value; });
    team.leader([=, *this] { sums[number] = sum; });
  }
};

/// sums[0] from the parts' sums after it.
struct SumOfParts {
  int64_t parts;
  Real* sums;
  template <class Team>
  LOCKSTEP_BODY void operator()(const Team& team, int64_t) const {
    const Real sum = team.sum(parts, [=, *this](int64_t i) { return sums[1 + i]; });
    team.leader([=, *this] { sums[0] = sum; });
  }
};

/// Scales x, of which squares[0] is the square of the norm, down to a norm of `most`.
struct ClipToNorm {
  const Real* squares;
  Real most;
  Real* x;
  using Arrays = Members<&ClipToNorm::x>;
  LOCKSTEP_BODY Real factor() const { return most / (std::sqrt(squares[0]) + Real(1e-6)); }
  LOCKSTEP_BODY bool enabled() const { return !(factor() >= 1); }  // a norm that is NaN shows in x
  LOCKSTEP_BODY Scale prepared() const { return {factor(), x}; }
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
  using Arrays =
      std::conditional_t<kMomentum,
                         Members<&SgdUpdate::gradient, &SgdUpdate::velocity, &SgdUpdate::weight>,
                         Members<&SgdUpdate::gradient, &SgdUpdate::weight>>;
  /// False in a skipped step, and once training has failed: the weights stay as the last good step
  /// left them.
  LOCKSTEP_BODY bool enabled() const { return health->updates(); }
  LOCKSTEP_BODY void operator()(int64_t i) const {
    // [task 01.1] SGD with momentum
    Real direction = gradient[i] + rule.weight_decay * weight[i];
    if (kMomentum) direction = velocity[i] = rule.momentum * velocity[i] + direction;
    weight[i] -= state->learning_rate * direction;
    // [end 01.1]
  }
};

}  // namespace lockstep::bodies
