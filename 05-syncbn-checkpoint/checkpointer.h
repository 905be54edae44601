#pragma once
// Checkpoints of a group of ranks: rank 0 decides; all learn the outcome.

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "04-ddp/ddp.h"
#include "05-syncbn-checkpoint/state_files.h"

namespace lockstep {

struct CheckpointOptions {
  std::filesystem::path directory{};
  int64_t keep = 2;               // newest checkpoints; the one before the last is always kept
  bool allow_world_size = false;  // resume what another number of ranks saved
  int64_t steps_per_epoch = 0;    // the counters of a checkpoint must agree with it; 0: any
  /// They get rank 0's lines; by default stdout and stderr.
  std::function<void(const std::string&)> say{}, warn{};
};

/// Saves and resumes. All ranks make the same calls in the same order, and all return, or throw the
/// same error: what happens on rank 0 alone is sent to all in an exchange of texts, which is also a
/// barrier. How the state goes into files and back is not known here (StateFiles).
class Checkpointer {
 public:
  /// `comm` must outlive this object. `exchange` is that of its ranks. Throws BadInput if fewer
  /// than two checkpoints are to be kept.
  Checkpointer(std::unique_ptr<StateFiles> files, Communicator& comm, ExchangeTexts exchange,
               CheckpointOptions options);

  /// Saves the state after the steps enqueued so far; returns when the file is durable. Throws
  /// NonFinite for a run that went wrong, EnvironmentError where the file cannot be written:
  /// earlier checkpoints and the training in memory are then as before, and a later save may
  /// succeed.
  void save(const TrainingState& state);

  /// What training continues from. `source` says where to look: "auto" is the newest checkpoint in
  /// the directory that can be read; otherwise a file; "" is nowhere. `begin` is the state in which
  /// this run would begin, with its settings and world size; it is returned if there is no
  /// checkpoint. Otherwise network and optimizer become the checkpoint's on all ranks. Throws
  /// BadInput for a checkpoint that was saved under other settings or does not fit, that has later
  /// ones in the directory, or that is elsewhere while the directory has others, which this run
  /// would overwrite or remove. Throws it, too, where another run saves to the directory. Nothing
  /// is changed then.
  TrainingState resume(const std::string& source, const TrainingState& begin);

 private:
  void saved(const TrainingState& state, const std::string& report);
  std::optional<std::filesystem::path> choose(const std::string& source);
  std::optional<std::filesystem::path> newest();
  void require_own_directory(const std::filesystem::path& source) const;
  void require_no_later(const std::string& source, int64_t steps) const;
  void require_counters(const TrainingState& saved, const std::string& path) const;
  void require_world_size(const TrainingState& saved, const TrainingState& begin,
                          const std::string& path) const;
  TrainingState checked(const std::string& path, const TrainingState& begin) const;

  std::unique_ptr<StateFiles> files_;
  CheckpointRanks ranks_;
  CheckpointOptions options_;
  std::string training_;               // what files_ read last
  std::optional<DirectoryLock> lock_;  // on rank 0, as long as this run may save
  std::set<int64_t> damaged_;  // steps of checkpoints that could not be read when this run resumed
};

}  // namespace lockstep
