#pragma once
// This stage's options: those of stage 04, and two groups that stage 06 has, too.

#include <memory>
#include <string>

#include "04-ddp/stage_options.h"
#include "05-syncbn-checkpoint/checkpointer.h"

namespace lockstep {

/// Which ranks normalise a batch together.
struct SyncBatchNormOptions {
  bool no_sync_bn = false;
  int sync_bn_group = 0;  // ranks; 0: all

  void add_to(OptionParser& parser);

  /// These ranks: `all`, which then must live longer; with --sync-bn-group a group of ranks that
  /// follow each other; null with --no-sync-bn. All ranks call it, after connect(). Throws
  /// BadInput, on all, if the groups are not equally large.
  std::shared_ptr<Communicator> ranks(ProcessGroup& group, Device& device, Communicator& all) const;
  /// The --emulate value with which stage 01 normalises as these ranks do. Throws BadInput if there
  /// is none.
  std::string emulation(const StepOptions& step, size_t world_size) const;
};

/// What is saved, and where a run resumes.
struct SavingOptions {
  std::string directory;   // of the checkpoints; empty: none
  int64_t save_every = 0;  // steps; 0: only after epochs
  int64_t keep = 2;
  std::string resume;  // auto, a file, or empty: from the beginning
  bool allow_world_size = false;

  void add_to(OptionParser& parser);

  CheckpointOptions checkpoint_options(int64_t steps_per_epoch) const {
    return {.directory = directory,
            .keep = keep,
            .allow_world_size = allow_world_size,
            .steps_per_epoch = steps_per_epoch};
  }
};

struct CheckpointStageOptions : Options {
  RankOptions ranks;
  ReplicaOptions replica;
  StepOptions step;
  SyncBatchNormOptions sync_bn;
  SavingOptions saving;

  void add_to(OptionParser& parser) override;
};

/// Throws BadInput where ranks have running statistics of their own, and a checkpoint would have
/// rank 0's.
void check_saved_statistics(const StepOptions& step, const SyncBatchNormOptions& norm,
                            const SavingOptions& saving);

/// The state in which a run with these options begins.
TrainingState first_state(const OptionTable& options, const DatasetPair& data,
                          const ProcessGroup& group, const LearningRateSchedule& schedule);

}  // namespace lockstep
