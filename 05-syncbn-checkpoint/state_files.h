#pragma once
// How the state of training goes into the files of a checkpoint, and back: what differs between a
// run whose ranks all have the whole state, and one whose ranks share it out.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "05-syncbn-checkpoint/checkpoint.h"
#include "05-syncbn-checkpoint/training_state.h"
#include "common/comm/communicator.h"
#include "common/rendezvous/agreement.h"

namespace lockstep {

/// The ranks of a run: their devices' messages, and their texts.
struct CheckpointRanks {
  Communicator& comm;
  ExchangeTexts exchange;

  bool is_first() const { return comm.rank() == 0; }
  /// lockstep::together(), where only rank 0 has something to do: what it returned.
  std::string on_first(const std::function<std::string()>& work) const {
    return together(exchange, [&] { return is_first() ? work() : ""; })[0];
  }
};

/// All ranks make the same calls in the same order; all return, or throw the same error.
class StateFiles {
 public:
  virtual ~StateFiles() = default;

  /// Writes the checkpoint of this state into the directory, which is made if it is not there; one
  /// of the same step is replaced. Returns the bytes of all its files when they are durable. Throws
  /// NonFinite for numbers that are not finite, EnvironmentError where a file cannot be written:
  /// then the earlier checkpoints are still there, and no part of the new one.
  virtual int64_t save(const CheckpointRanks& ranks, const std::filesystem::path& directory,
                       const TrainingState& state) = 0;

  /// Reads and checks the files of a checkpoint, without a change to training, and returns its
  /// TrainingState as text. Throws BadInput for files that are damaged, missing, or do not belong
  /// together.
  virtual std::string read(const CheckpointRanks& ranks, const std::filesystem::path& path) = 0;

  /// On rank 0 alone: throws BadInput unless what was read fits the network and the optimizer.
  virtual void require_fitting() const = 0;

  /// What was read becomes the state of training, on all ranks.
  virtual void restore(const CheckpointRanks& ranks) = 0;
};

/// The files of a state that every rank has whole: rank 0 writes and reads them, no other rank
/// touches the file system.
std::unique_ptr<StateFiles> files_of(const Trained& trained);

}  // namespace lockstep
