#pragma once
// This stage's options: those of stage 04, and two groups that stage 06 has, too.

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "04-ddp/stage_options.h"
#include "05-syncbn-checkpoint/training_state.h"

namespace lockstep {

/// Which ranks normalise a batch together.
struct SyncBatchNormOptions {
  bool no_sync_bn = false;
  int sync_bn_group = 0;  // ranks; 0: all

  void add_to(OptionParser& parser);

  /// The communicator of the ranks that normalise together: `all`, which must outlive it; with
  /// --sync-bn-group a group of consecutive ranks; null with --no-sync-bn. All ranks call this
  /// after connect(). Throws BadInput, on all ranks, if the groups are not equally large.
  std::shared_ptr<Communicator> comm(ProcessGroup& group, Device& device, Communicator& all) const;
  /// The --emulate value with which stage 01 normalises as these ranks do. Throws BadInput if there
  /// is none.
  std::string emulation(const StepOptions& step, size_t world_size) const;
};

/// When a run saves, what it keeps, and where it resumes.
struct SavingOptions {
  std::string directory{};  // of the checkpoints; empty: none
  int64_t save_every = 0;   // steps; 0: only after epochs
  int64_t keep = 2;         // newest checkpoints
  std::string resume{};     // auto, a file, or empty: from the beginning
  bool allow_world_size = false;
  /// Called with each line to print, mostly on rank 0; by default lines go to stdout and stderr.
  std::function<void(const std::string&)> say{}, warn{};

  void add_to(OptionParser& parser);
};

struct CheckpointStageOptions : Options {
  RankOptions ranks;
  ReplicaOptions replica;
  StepOptions step;
  SyncBatchNormOptions sync_bn;
  SavingOptions saving;

  void add_to(OptionParser& parser) override;
};

/// Throws BadInput where ranks have running statistics of their own: a checkpoint would have only
/// rank 0's.
void check_saved_statistics(const StepOptions& step, const SyncBatchNormOptions& norm,
                            const SavingOptions& saving);

/// Throws BadInput where simulated devices would save or resume.
void refuse_simulated(const Options& options, const SavingOptions& saving);

/// The state in which a run with these options begins.
TrainingState first_state(const OptionTable& options, const DatasetPair& data,
                          const ProcessGroup& group, const LearningRateSchedule& schedule);

// --- The settings of a run that another one resumes ----------------------------------------------

/// The settings of a run that must not change between saving and resuming: options, and a
/// fingerprint of the training data.
nlohmann::json training_settings(const OptionTable& options, const DatasetPair& data);

/// Throws BadInput if a setting of this run (`found`) differs from the run that saved `what`
/// (`saved`). The error has the first such setting, both values and what to do. Settings that only
/// change the order of sums may differ: backend and threads.
void require_saved_settings(const nlohmann::json& saved, const nlohmann::json& found,
                            const std::string& what);
/// Names those settings that differ, for a warning: backend "tcp" instead of "gloo". Empty if none
/// differs.
std::string other_order_of_sums(const nlohmann::json& saved, const nlohmann::json& found);

}  // namespace lockstep
