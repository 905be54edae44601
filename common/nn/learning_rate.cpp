#include "common/nn/learning_rate.h"

#include <cmath>

namespace lockstep {

double LearningRateSchedule::at(int64_t step) const {
  if (step < warmup_steps) {
    return warmup_from + (base - warmup_from) * double(step + 1) / double(warmup_steps);
  }
  if (decay_steps == 0) return base;
  const int64_t decays = step / decay_steps;
  return base * std::pow(gamma, double(decays));
}

}  // namespace lockstep
