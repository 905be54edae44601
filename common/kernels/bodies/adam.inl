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
/// every number.
struct AdamUpdate {
  const StepState* state;
  const Health* health;
  AdamRule rule;
  const Real* gradient;
  Real* exp_avg;
  Real* exp_avg_sq;
  Real* weight;
  /// False once training has failed: the weights stay as the last good step left them.
  LOCKSTEP_BODY bool enabled() const { return health->failed_step < 0; }
  LOCKSTEP_BODY AdamStep prepared() const {
    const double t = double(state->step + 1), rate = double(state->learning_rate);
    return {.gradient = gradient,
            .exp_avg = exp_avg,
            .exp_avg_sq = exp_avg_sq,
            .weight = weight,
            .decay = Real(rule.decoupled ? 0 : rule.weight_decay),
            .shrink = Real(rule.decoupled ? 1 - rate * rule.weight_decay : 1),
            .share1 = Real(1 - rule.beta1),
            .beta2 = Real(rule.beta2),
            .share2 = Real(1 - rule.beta2),
            .rate = Real(rate / (1 - std::pow(rule.beta1, t))),
            .root = Real(std::sqrt(1 - std::pow(rule.beta2, t))),
            .eps = Real(rule.eps)};
  }
};

}  // namespace lockstep::bodies
