#pragma once
// When a run saves, and where it goes on.

#include "05-syncbn-checkpoint/checkpointer.h"
#include "05-syncbn-checkpoint/stage_options.h"

namespace lockstep {

/// Saves as the options say. A save that fails does not end a run of many hours: every rank says
/// why, training goes on, and the next save is tried as planned. Only a run whose last save failed
/// ends with the error. All ranks make the same calls.
class CheckpointPlan {
 public:
  /// `checkpointer` must outlive this. `settle` throws if training has gone wrong so far; it is
  /// called before every save.
  CheckpointPlan(Checkpointer& checkpointer, const CheckpointStageOptions& options, int rank,
                 std::function<void()> settle);

  /// `state` is that behind the step, or behind the epoch with its evaluation.
  void after_step(const TrainingState& state);
  void after_epoch(const TrainingState& state);
  /// At the end of training. Throws EnvironmentError if the newest state is not saved.
  void finish() const;

 private:
  void save(const TrainingState& state);

  Checkpointer& checkpointer_;
  bool saves_;
  int64_t every_;  // steps; 0: only after epochs
  int rank_;
  std::function<void()> settle_;
  std::string failure_;  // of the last save
};

}  // namespace lockstep
