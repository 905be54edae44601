#pragma once
// This stage's own options, in addition to those of stage 04.

#include <string>

#include "04-ddp/stage_options.h"
#include "05-syncbn-checkpoint/checkpointer.h"

namespace lockstep {

struct CheckpointStageOptions : DdpStageOptions {
  bool no_sync_bn = false;
  int sync_bn_group = 0;   // ranks that normalise together; 0: all
  std::string directory;   // of the checkpoints; empty: none
  int64_t save_every = 0;  // steps; 0: only after epochs
  int64_t keep = 2;
  std::string resume;  // auto, a file, or empty: from the beginning
  bool allow_world_size = false;

  void add_to(OptionParser& parser);
  /// The --emulate value with which stage 01 normalises as these ranks do. Throws BadInput if there
  /// is none.
  std::string emulation(size_t world_size) const;
  /// The ranks that normalise together: `all`, which then must live longer; with --sync-bn-group a
  /// group of ranks that follow each other; null with --no-sync-bn. All ranks call it, after
  /// connect(). Throws BadInput, on all, if the groups are not equally large.
  std::shared_ptr<Communicator> batch_norm_ranks(ProcessGroup& group, Device& device,
                                                 Communicator& all) const;
  CheckpointOptions checkpoint_options(int64_t steps_per_epoch) const {
    return {.directory = directory,
            .keep = keep,
            .allow_world_size = allow_world_size,
            .steps_per_epoch = steps_per_epoch};
  }
};

/// As stage 04's, for this stage's options, too.
void require_same_settings(ProcessGroup& group, const Options& options,
                           const CheckpointStageOptions& own, const DatasetPair& data);

/// The state in which a run with these options begins.
TrainingState first_state(const Options& options, const CheckpointStageOptions& own,
                          const DatasetPair& data, const ProcessGroup& group,
                          const LearningRateSchedule& schedule);

}  // namespace lockstep
