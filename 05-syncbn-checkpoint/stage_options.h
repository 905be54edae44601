#pragma once
// This stage's own options, in addition to those of stage 04.

#include <string>

#include "04-ddp/stage_options.h"
#include "05-syncbn-checkpoint/checkpointer.h"

namespace lockstep {

struct CheckpointStageOptions : DdpStageOptions {
  bool no_sync_bn = false;
  std::string directory;   // of the checkpoints; empty: none
  int64_t save_every = 0;  // steps; 0: only after epochs
  int64_t keep = 2;
  std::string resume;  // auto, a file, or empty: from the beginning
  bool allow_world_size = false;

  void add_to(OptionParser& parser);
  /// The --emulate value with which stage 01 normalises as these ranks do. Throws BadInput if there
  /// is none.
  std::string emulation(size_t world_size) const {
    const std::string parts = DdpStageOptions::emulation(world_size);
    return no_sync_bn ? parts : "none";
  }
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
