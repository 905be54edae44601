#pragma once
// Saving and resuming: when a run saves, and from which state it goes on. Rank 0 decides; all
// learn the outcome.

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "05-syncbn-checkpoint/checkpoint.h"
#include "05-syncbn-checkpoint/stage_options.h"
#include "common/comm/communicator.h"
#include "common/comm/process_group.h"
#include "common/rendezvous/agreement.h"

namespace lockstep {

/// All ranks make the same calls in the same order. All return, or all throw the same error: an
/// exchange of texts, which is also a barrier, tells all what happened on some. Derived classes
/// write the state to files and read it back. They differ: either all ranks have the whole state,
/// or ranks share the state out (stage 06).
class Checkpointer {
 public:
  /// `comm` must outlive this object. `exchange` is that of its ranks. `settle` throws if training
  /// has gone wrong so far; it is called before every save that the options ask for. With 0 steps
  /// per epoch the counters of a checkpoint are not checked. Throws BadInput if fewer than two
  /// checkpoints are to be kept.
  Checkpointer(
      SavingOptions options, Communicator& comm, ExchangeTexts exchange,
      int64_t steps_per_epoch = 0, std::function<void()> settle = [] {});
  /// The same in a group, in which one rank alone prints an error of resume() or finish().
  Checkpointer(SavingOptions options, Communicator& comm, ProcessGroup& group,
               int64_t steps_per_epoch, std::function<void()> settle);
  virtual ~Checkpointer() = default;
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Returns the state from which training continues. --resume says where to look: "auto" is
  /// the newest checkpoint of the directory that can be read; otherwise a file; "" is
  /// nowhere. `first` is the state in which this run would begin, with its settings and world
  /// size. It is returned if there is no checkpoint. Otherwise all ranks load network and
  /// optimizer. Throws BadInput if the checkpoint has other settings or does not fit, or if
  /// another run saves to the directory. Also throws it if this run would overwrite or remove
  /// checkpoints in the directory: later ones, or any if this one is elsewhere. Nothing is
  /// changed then.
  TrainingState resume(const TrainingState& first);

  /// Saves if --save-every says so. `state` is the state after the step.
  void after_step(const TrainingState& state);
  /// Saves after the evaluation of an epoch, or of the part of it that --max-steps allowed. Counts
  /// the epoch if it is over.
  void after_epoch(TrainingState& state, double accuracy);
  /// Saves the state after the steps enqueued so far, if there is a directory; returns when the
  /// files are durable. Throws NonFinite for a run that went wrong. A save that fails for another
  /// reason does not end a run of many hours. Every rank says why, training continues, and the
  /// earlier checkpoints are as before.
  void save(const TrainingState& state);
  /// At the end of training. Throws EnvironmentError if the last save failed.
  void finish() const;

 protected:
  /// Writes the checkpoint of this state. Makes the directory if it is not there; replaces one of
  /// the same step. Returns the bytes of all its files when they are durable. Throws NonFinite for
  /// numbers that are not finite. Throws EnvironmentError where a file cannot be written: no part
  /// of a new checkpoint is left then.
  virtual int64_t write(const TrainingState& state) = 0;
  /// Reads and checks the files of a checkpoint, without a change to training, and returns its
  /// TrainingState as text. Throws BadInput for files that are damaged, missing, or do not belong
  /// together.
  virtual std::string read(const std::filesystem::path& path) = 0;
  /// On rank 0 alone: throws BadInput unless the files that were read fit network and optimizer.
  virtual void require_fitting() const = 0;
  /// Makes what was read the state of training, on all ranks.
  virtual void restore() = 0;
  virtual const Optimizer& optimizer() const = 0;
  /// TrainingState::sample_parts
  virtual int64_t sample_parts() const { return 0; }

  Communicator& comm() const { return comm_; }
  std::filesystem::path directory() const { return options_.directory; }
  /// For together(), where all ranks have something to do.
  const ExchangeTexts& exchange() const { return exchange_; }
  /// Runs `work` on rank 0 alone; returns its text on all ranks.
  std::string on_first(const std::function<std::string()>& work) const {
    const std::function<std::string()> nothing = [] { return std::string(); };
    return together(exchange_, is_first() ? work : nothing)[0];
  }
  bool is_first() const { return comm_.rank() == 0; }

 private:
  TrainingState with_scale(TrainingState state) const;
  void say_saved(const TrainingState& state, const std::string& report);
  TrainingState resumed(const TrainingState& begin);
  std::optional<std::filesystem::path> choose();
  std::optional<std::filesystem::path> newest();
  void require_own_directory() const;
  void require_no_later(const std::string& source, int64_t steps) const;
  void require_counters(const TrainingState& saved, const std::string& path) const;
  void require_world_size(const TrainingState& saved, const TrainingState& begin,
                          const std::string& path) const;
  TrainingState checked(const std::string& path, const TrainingState& begin) const;

  SavingOptions options_;
  Communicator& comm_;
  ExchangeTexts exchange_;
  /// Runs work that fails on all ranks or on none.
  std::function<void(const std::function<void()>&)> together_;
  int64_t steps_per_epoch_;
  std::function<void()> settle_;
  std::string failure_;                // of the last save
  std::string training_;               // what read() returned last
  std::optional<DirectoryLock> lock_;  // on rank 0, as long as this run may save
  std::set<int64_t> damaged_;  // steps of checkpoints that could not be read when this run resumed
};

/// For ranks that all have the whole state: rank 0 writes and reads the files, no other rank
/// touches the file system.
class RankZeroCheckpointer final : public Checkpointer {
 public:
  template <class... Base>
  explicit RankZeroCheckpointer(const Trained& trained, Base&&... base)
      : Checkpointer(std::forward<Base>(base)...), trained_(trained) {}

 private:
  int64_t write(const TrainingState& state) override;
  std::string read(const std::filesystem::path& path) override;
  void require_fitting() const override { lockstep::require_fitting(checkpoint_, trained_); }
  void restore() override;
  const Optimizer& optimizer() const override { return trained_.optimizer; }

  Trained trained_;
  Checkpoint checkpoint_;  // on rank 0: what was read last
};

}  // namespace lockstep
