#pragma once
// Checkpoints of a group of ranks: rank 0 writes, decides and reads; the others learn the outcome.

#include <filesystem>
#include <functional>
#include <set>
#include <string>

#include "04-ddp/ddp.h"
#include "05-syncbn-checkpoint/checkpoint.h"
#include "common/comm/communicator.h"
#include "common/system/descriptor.h"

namespace lockstep {

struct CheckpointOptions {
  std::filesystem::path directory{};
  int64_t keep = 2;               // newest checkpoints; the one before the last is always kept
  bool allow_world_size = false;  // resume what another number of ranks saved
  int64_t steps_per_epoch = 0;    // that counters of a checkpoint must fit to; 0: any
  /// Get what rank 0 has to tell; by default stdout and stderr.
  std::function<void(const std::string&)> say{}, warn{};
};

/// Saves and resumes. All ranks make the same calls in the same order, and all return, or throw the
/// same error: what happens on rank 0 alone is told to all in an exchange of texts, which is a
/// barrier, too. No rank but rank 0 touches the file system.
class Checkpointer {
 public:
  /// All of them must outlive this. `exchange` is that of the group of `ranks`. Throws BadInput if
  /// less than two checkpoints are to be kept.
  Checkpointer(const Trained& trained, Communicator& ranks, ExchangeTexts exchange,
               CheckpointOptions options);

  /// Saves the state behind the steps enqueued so far; returns when the file is durable. Throws
  /// NonFinite for a run that went wrong, EnvironmentError where the file cannot be written:
  /// earlier checkpoints and the training in memory are then as before, and a later save may
  /// succeed.
  void save(const TrainingState& state);

  /// What training goes on from. `source` says where that is: "auto", the newest checkpoint in the
  /// directory that can be read; a file; or "", nowhere. `begin` is the state in which this run
  /// would begin, with its settings and world size, and what comes back if there is no checkpoint.
  /// Otherwise network and momentum are the checkpoint's on all ranks. Throws BadInput for one that
  /// was saved under other settings, does not fit, or lies before others in the directory, or
  /// elsewhere while there are others in it, which this run would come to overwrite or remove,
  /// or where another run saves to the directory; nothing is changed then.
  TrainingState resume(const std::string& source, const TrainingState& begin);

 private:
  void save_here(const TrainingState& state);
  void lock_directory();
  void require_counters(const TrainingState& saved, const std::string& path) const;
  std::string restore_here(const Checkpoint& checkpoint, const TrainingState& begin);
  std::optional<Checkpoint> choose(const std::string& source);
  void require_own_directory(const std::filesystem::path& source) const;
  void require_no_later(const std::string& source, int64_t steps) const;
  TrainingState checked(const Checkpoint& checkpoint, const TrainingState& begin) const;
  void require_world_size(const Checkpoint& checkpoint, const TrainingState& saved,
                          const TrainingState& begin) const;
  void broadcast_tensors() const;

  Trained trained_;
  Communicator& ranks_;
  ExchangeTexts exchange_;
  CheckpointOptions options_;
  Descriptor lock_;            // of the directory, as long as this run may save
  std::set<int64_t> damaged_;  // steps of checkpoints that could not be read when this run resumed
};

}  // namespace lockstep
