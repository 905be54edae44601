#pragma once
// When a run saves, and where it resumes.

#include "05-syncbn-checkpoint/checkpointer.h"
#include "05-syncbn-checkpoint/stage_options.h"

namespace lockstep {

/// Saves as the options say. A failed save does not end a run of many hours: every rank says why,
/// training continues, and the next save is tried as planned. Only a run whose last save failed
/// ends with the error. All ranks make the same calls.
class CheckpointPlan {
 public:
  /// All of them must outlive this object; `files` are of the state of training. `settle` throws if
  /// that has gone wrong so far; it is called before every save.
  CheckpointPlan(const SavingOptions& options, std::unique_ptr<StateFiles> files,
                 Communicator& comm, ProcessGroup& group, int64_t steps_per_epoch,
                 std::function<void()> settle);

  /// What training continues from, as --resume says (Checkpointer::resume). An error is printed
  /// once.
  TrainingState resume(const TrainingState& begin);
  /// `state` is the state after the step.
  void after_step(const TrainingState& state);
  /// After the evaluation of an epoch, or of the part of it that --max-steps allowed. Counts the
  /// epoch if it is over.
  void after_epoch(TrainingState& state, double accuracy);
  /// At the end of training. Throws EnvironmentError if the newest state is not saved.
  void finish() const;

 private:
  void save(const TrainingState& state);

  ProcessGroup& group_;
  Checkpointer checkpointer_;
  std::string source_;  // --resume
  bool saves_;
  int64_t every_;  // steps; 0: only after epochs
  int64_t steps_per_epoch_;
  std::function<void()> settle_;
  std::string failure_;  // of the last save
};

}  // namespace lockstep
