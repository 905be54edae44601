#pragma once
// Adam's and AdamW's pass over the flat buffers.

#include <cmath>

#include "common/kernels/bodies/portable.h"

namespace lockstep::bodies {

/// The update of number i, with the factors that all numbers share. Weight and moments are read
/// once and written once, the gradient is only read.
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
  LOCKSTEP_BODY void operator()(int64_t i) const {
    const Real g = gradient[i] + decay * weight[i];
    const Real m = exp_avg[i] = exp_avg[i] + share1 * (g - exp_avg[i]);
    const Real v = exp_avg_sq[i] = beta2 * exp_avg_sq[i] + share2 * g * g;
    weight[i] = shrink * weight[i] - rate * m / (std::sqrt(v) / root + eps);
  }
};

/// torch.optim.Adam and AdamW (AdamRule). The number of the step, t, comes from StepState, so that
/// a step that was captured as a graph counts on; the powers of the betas are made once, not for
/// every number. 1 - beta^t = -expm1(t log(beta)): subtracted in float32, only four digits of
/// 1 - 0.999 would be right. So the host makes such numbers of the rule, in float64.
struct AdamUpdate {
  const StepState* state;
  const Health* health;
  AdamStep step;  // with a rate of 1 and no correction
  Real log_beta1, log_beta2;
  Real decoupled_decay;  // of the weight, per learning rate; 0 if not decoupled

  AdamUpdate(const StepState* state, const Health* health, const AdamRule& rule,
             const Real* gradient, Real* exp_avg, Real* exp_avg_sq, Real* weight)
      : state(state),
        health(health),
        step{.gradient = gradient,
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
        log_beta1(Real(std::log(rule.beta1))),
        log_beta2(Real(std::log(rule.beta2))),
        decoupled_decay(Real(rule.decoupled ? rule.weight_decay : 0)) {}

  /// False once training has failed: the weights stay as the last good step left them.
  LOCKSTEP_BODY bool enabled() const { return health->failed_step < 0; }
  LOCKSTEP_BODY AdamStep prepared() const {
    const Real t = Real(state->step + 1), rate = state->learning_rate;
    const Real correction1 = -std::expm1(t * log_beta1), correction2 = -std::expm1(t * log_beta2);
    return {.gradient = step.gradient,
            .exp_avg = step.exp_avg,
            .exp_avg_sq = step.exp_avg_sq,
            .weight = step.weight,
            .decay = step.decay,
            .shrink = 1 - rate * decoupled_decay,
            .share1 = step.share1,
            .beta2 = step.beta2,
            .share2 = step.share2,
            .rate = rate / correction1,
            .root = std::sqrt(correction2),
            .eps = step.eps};
  }
};

}  // namespace lockstep::bodies
