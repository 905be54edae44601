#include "05-syncbn-checkpoint/checkpoint_plan.h"

#include <cstdio>
#include <utility>

#include "common/core/error.h"

namespace lockstep {

CheckpointPlan::CheckpointPlan(Checkpointer& checkpointer, const CheckpointStageOptions& options,
                               int rank, std::function<void()> settle)
    : checkpointer_(checkpointer),
      saves_(!options.directory.empty()),
      every_(options.save_every),
      rank_(rank),
      settle_(std::move(settle)) {}

void CheckpointPlan::after_step(const TrainingState& state) {
  if (every_ > 0 && state.steps % every_ == 0) save(state);
}

void CheckpointPlan::after_epoch(const TrainingState& state) { save(state); }

void CheckpointPlan::save(const TrainingState& state) {
  if (!saves_) return;
  settle_();
  try {
    checkpointer_.save(state);
    failure_.clear();
  } catch (const EnvironmentError& error) {
    failure_ = error.what();
    std::fflush(stdout);
    fmt::print(stderr, "warning: rank {}: step {} is not saved: {}; training goes on\n", rank_,
               state.steps, failure_);
  }
}

void CheckpointPlan::finish() const {
  if (!failure_.empty()) fail<EnvironmentError>("the last checkpoint is missing: {}", failure_);
}

}  // namespace lockstep
