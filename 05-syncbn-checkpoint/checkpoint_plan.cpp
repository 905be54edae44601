#include "05-syncbn-checkpoint/checkpoint_plan.h"

#include <cstdio>
#include <utility>

#include "common/core/error.h"
#include "common/core/text.h"

namespace lockstep {

CheckpointPlan::CheckpointPlan(const SavingOptions& options, std::unique_ptr<StateFiles> files,
                               Communicator& comm, ProcessGroup& group, int64_t steps_per_epoch,
                               std::function<void()> settle)
    : group_(group),
      checkpointer_(std::move(files), comm, group.exchanger(),
                    options.checkpoint_options(steps_per_epoch)),
      source_(options.resume),
      saves_(!options.directory.empty()),
      every_(options.save_every),
      steps_per_epoch_(steps_per_epoch),
      settle_(std::move(settle)) {}

TrainingState CheckpointPlan::resume(const TrainingState& begin) {
  return group_.together([&] { return checkpointer_.resume(source_, begin); });
}

void CheckpointPlan::after_step(const TrainingState& state) {
  if (every_ > 0 && state.steps % every_ == 0) save(state);
}

void CheckpointPlan::after_epoch(TrainingState& state, double accuracy) {
  if (state.step_in_epoch == steps_per_epoch_) state.count_epoch(accuracy);
  save(state);
}

void CheckpointPlan::save(const TrainingState& state) {
  if (!saves_) return;
  settle_();
  try {
    checkpointer_.save(state);
    failure_.clear();
  } catch (const EnvironmentError& error) {
    failure_ = error.what();
    warn(fmt::format("rank {}: step {} is not saved: {}; training goes on", group_.rank(),
                     state.steps, failure_));
  }
}

void CheckpointPlan::finish() const {
  group_.together([&] {
    if (!failure_.empty()) fail<EnvironmentError>("the last checkpoint is missing: {}", failure_);
  });
}

}  // namespace lockstep
