#pragma once
// Adam's and AdamW's pass over the flat buffers.

#include <cmath>

#include "common/kernels/bodies/portable.h"

namespace lockstep::bodies {

/// The update of number i, with the factors that all numbers of its parameter share. Weight and
/// moments are read once and written once, the gradient is only read.
struct AdamStep {
  const Real* gradient;
  Real* exp_avg;     // m
  Real* exp_avg_sq;  // v
  Real* weight;
  Real decay;                  // of the gradient, L2; 0 if decoupled
  Real shrink;                 // of the weight; 1 if not decoupled
  Real share1, beta2, share2;  // 1 - beta1, beta2, 1 - beta2
  Real rate;                   // lr / (1 - beta1^t)
  Real root;                   // sqrt(1 - beta2^t)
  Real eps;
  using Arrays =
      Members<&AdamStep::gradient, &AdamStep::exp_avg, &AdamStep::exp_avg_sq, &AdamStep::weight>;
  LOCKSTEP_BODY void operator()(int64_t i) const {
    const Real g = gradient[i] + decay * weight[i];
    const Real m = exp_avg[i] = exp_avg[i] + share1 * (g - exp_avg[i]);
    const Real v = exp_avg_sq[i] = beta2 * exp_avg_sq[i] + share2 * g * g;
    weight[i] = shrink * weight[i] - rate * m / (std::sqrt(v) / root + eps);
  }
};

/// The steps of parameters, and what those make of Adam's factors; parameter p. -expm1(t log(beta))
/// is 1 - beta^t: subtracted in float32, only four digits of 1 - 0.999 would be right.
struct AdamCount {
  const StepState* state;
  const Health* health;
  const Real* marks;
  Real log_beta1, log_beta2;  // made by the host, in float64
  int64_t* steps;
  Real* factors;

  AdamCount(const StepState* state, const Health* health, const Real* marks, const AdamRule& rule,
            int64_t* steps, Real* factors)
      : state(state),
        health(health),
        marks(marks),
        log_beta1(Real(std::log(rule.beta1))),
        log_beta2(Real(std::log(rule.beta2))),
        steps(steps),
        factors(factors) {}

  LOCKSTEP_BODY bool enabled() const { return health->updates(); }
  LOCKSTEP_BODY void operator()(int64_t p) const {
    if (!(marks[p] > 0)) return;
    const Real t = Real(++steps[p]);
    const Real correction1 = -std::expm1(t * log_beta1), correction2 = -std::expm1(t * log_beta2);
    factors[2 * p] = state->learning_rate / correction1;
    factors[2 * p + 1] = std::sqrt(correction2);
  }
};

/// torch.optim.Adam and AdamW (AdamRule). What changes from step to step comes from device memory,
/// so that a step that was captured as a graph counts on.
struct AdamUpdate : AdamStep {  // without rate and root
  const StepState* state;
  const Health* health;
  const Real* factors;   // of each parameter: rate and root
  Real decoupled_decay;  // of the weight, per learning rate; 0 if not decoupled

  AdamUpdate(const StepState* state, const Health* health, const AdamRule& rule,
             const Real* factors, const Real* gradient, Real* exp_avg, Real* exp_avg_sq,
             Real* weight)
      : AdamStep{.gradient = gradient,
                 .exp_avg = exp_avg,
                 .exp_avg_sq = exp_avg_sq,
                 .weight = weight,
                 .decay = Real(rule.decoupled ? 0 : rule.weight_decay),
                 .shrink = 1,
                 .share1 = Real(1 - rule.beta1),
                 .beta2 = Real(rule.beta2),
                 .share2 = Real(1 - rule.beta2),
                 .rate = 1,
                 .root = 1,
                 .eps = Real(rule.eps)},
        state(state),
        health(health),
        factors(factors),
        decoupled_decay(Real(rule.decoupled ? rule.weight_decay : 0)) {}

  /// False in a skipped step, and once training has failed: the weights stay as the last good step
  /// left them.
  LOCKSTEP_BODY bool enabled() const { return health->updates(); }
  LOCKSTEP_BODY AdamStep prepared(int64_t parameter) const {
    AdamStep ready = *this;
    ready.shrink = 1 - state->learning_rate * decoupled_decay;
    ready.rate = factors[2 * parameter];
    ready.root = factors[2 * parameter + 1];
    return ready;
  }
};

}  // namespace lockstep::bodies
