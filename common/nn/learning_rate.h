#pragma once
// The learning rate of every step.

#include <cstdint>

namespace lockstep {

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
