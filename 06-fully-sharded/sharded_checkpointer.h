#pragma once
// Saving and resuming where ranks share out the state of training: each rank writes its shard, and
// rank 0 makes the shards a checkpoint (sharded_checkpoint.h).

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "05-syncbn-checkpoint/checkpointer.h"
#include "06-fully-sharded/fully_sharded.h"
#include "06-fully-sharded/sharded_checkpoint.h"

namespace lockstep {

/// Writes files to a disk that the ranks share. A rank writes equally much with every ShardKind. A
/// run may resume with another kind, other units and another number of ranks. These of the ten
/// steps of a save (stage 05's README.md) look like this:
///   1. every rank looks for numbers that are not finite, and copies its shard to the host;
///   2. all ranks write, each a file of its own, by steps 5 to 8;
///   3. rank 0 removes leftovers before anyone writes;
///   4. rank 0 writes the checkpoint's own file when all shards are durable: that is the commit;
///   10. what failed on one rank has failed on all.
/// If only the counters have changed since the last checkpoint (of the same step), its shards stay
/// as they are. A checkpoint that is there must not get its shards replaced one by one.
class ShardedCheckpointer : public Checkpointer {
 public:
  /// `network`, and `optimizer`, which updates its shards(), must outlive this object.
  template <class... Base>
  ShardedCheckpointer(FullyShardedDataParallel& network, const Optimizer& optimizer, Base&&... base)
      : Checkpointer(std::forward<Base>(base)...), network_(network), optimizer_(optimizer) {}

 protected:
  /// The numbers that this rank keeps of a unit's shard(): values, or a state of the optimizer.
  struct NamedNumbers {
    std::string state;
    Tensor numbers{};
  };
  std::vector<NamedNumbers> kept_of(size_t unit) const;
  const FullyShardedDataParallel& network() const { return network_; }
  const Optimizer& optimizer() const override { return optimizer_; }

  // Files have the whole network's parameters. Stage 07 overrides these functions, since its ranks
  // have only parts of the parameters. All ranks call the functions that return numbers.

  /// The pieces that this rank writes.
  virtual std::vector<ShardPiece> pieces() const;
  /// All parameters: names and PyTorch's shapes.
  virtual std::vector<StateTensor> parameters() const;
  /// How often each parameter has been updated; empty for SGD.
  virtual std::map<std::string, double> steps() const;
  /// The entries of `saved` for this rank's parameters.
  virtual std::map<std::string, double> own_steps(
      const std::map<std::string, double>& saved) const {
    return saved;
  }
  virtual std::vector<StateTensor> running() const { return running_state(network_); }
  /// Throws BadInput for a state that is not the whole network's.
  virtual void check(const std::vector<StateTensor>& saved) const {
    check_state_dict(network_, saved);
  }
  /// Reads elements of this rank's parameter, or of a state of the optimizer.
  virtual std::vector<Real> read_from(const ShardedCheckpoint& checkpoint, const std::string& state,
                                      const Parameter& parameter, FlatRange elements) const {
    return checkpoint.read(state, parameter.name, elements);
  }
  virtual void load_running(const std::map<std::string, StateTensor>& running) const {
    load_running_state(network_, running);
  }

 private:
  int64_t write(const TrainingState& state) override;
  std::string read(const std::filesystem::path& path) override;
  void require_fitting() const override;
  void restore() override;

  bool has_shards(const std::filesystem::path& path) const;
  ShardIndex index_of(std::vector<std::string> checksums) const;
  int64_t commit(const std::filesystem::path& path, const ShardIndex& index,
                 const TrainingState& state, const std::vector<StateTensor>& running);
  std::vector<int64_t> steps_read() const;

  FullyShardedDataParallel& network_;
  const Optimizer& optimizer_;
  std::optional<ShardedCheckpoint> read_;  // what was read last
  /// The checkpoint whose shards have the present values, and what it says of them.
  std::optional<std::pair<std::filesystem::path, ShardIndex>> present_;
};

}  // namespace lockstep
