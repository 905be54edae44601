#pragma once
// The files of a checkpoint that every rank writes a part of.
//
//   step-000000938.rank-1-of-4.safetensors   what rank 1 updates: of each parameter in its shard
//                                            "value.conv1.weight" [n], and n numbers of each of the
//                                            optimizer's states, "momentum.conv1.weight"
//   step-000000938.safetensors               the checkpoint: running statistics and TrainingState;
//                                            which parameters there are; the shards' checksums
//
// A shard says which element of a parameter its piece begins with. Elements count in memory order:
// convolution weights lie O,kh,kw,I. So the files do not depend on units, and any number of ranks
// can read what it needs.

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "06-fully-sharded/shards.h"
#include "common/io/safetensors.h"
#include "common/nn/state_dict.h"

namespace lockstep {

/// The name of the parameters themselves, beside "momentum", "exp_avg" and "exp_avg_sq".
inline constexpr const char* kValues = "value";

/// Which shard a file holds: that of this rank, after these steps.
struct ShardPlace {
  int64_t steps = 0;
  int rank = 0, world_size = 1;
  friend bool operator==(const ShardPlace&, const ShardPlace&) = default;
};

/// The facts about the shards in the checkpoint's own file.
struct ShardIndex {
  std::vector<std::string> checksums{};   // of the shards, by rank
  std::vector<std::string> states{};      // "value" first
  std::vector<StateTensor> parameters{};  // names and PyTorch's shapes, no values
  std::map<std::string, double> steps{};  // of each parameter, for steps_of(); empty for SGD

  std::string to_json() const;
  /// Throws BadInput, naming `what`, for text that is not what to_json() makes. Causes: a state
  /// that is listed twice, extents that are no whole numbers from 1 on, or a shape whose elements
  /// nothing can count.
  static ShardIndex from_json(const std::string& text, const std::string& what);
};

/// Numbers of a parameter, or of a state of the optimizer, in one rank's shard.
struct ShardPiece {
  std::string state;      // "value", "momentum", ...
  std::string parameter;  // "conv1.weight"
  int64_t first = 0;      // element of the parameter
  std::vector<Real> numbers{};
};

/// Writes a shard beside the checkpoint that will be at `path`. Returns the checksum that
/// identifies the file.
std::string save_shard(const std::filesystem::path& path, const ShardPlace& place,
                       const std::vector<ShardPiece>& pieces);

/// Makes the shards beside `path` a checkpoint, which is there from now on. Throws BadInput if they
/// are not the shards that the index names.
void commit_shards(const std::filesystem::path& path, const ShardIndex& index,
                   const std::string& training, const std::vector<StateTensor>& running);

/// A checkpoint that is read from the disk as far as it is needed.
class ShardedCheckpoint {
 public:
  /// Opens all files and checks their headers. The shards must be those saved with the first
  /// file, and must have each element once, and nothing else. Throws BadInput, naming the file,
  /// if not.
  explicit ShardedCheckpoint(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::string& training() const { return training_; }  // for TrainingState::from_json()
  const ShardIndex& index() const { return index_; }
  const std::vector<StateTensor>& running() const { return running_; }  // for load_running_state()
  size_t shards() const { return files_.size(); }

  /// Reads a whole shard, a piece at a time, and compares the checksums. Throws BadInput.
  void verify(size_t shard) const;
  /// Reads elements of a parameter, or of a state of the optimizer, from the shards that have them.
  std::vector<Real> read(const std::string& state, const std::string& parameter,
                         FlatRange elements) const;

 private:
  void open_shard(size_t rank, int64_t steps);
  void require_listed(size_t rank, const std::set<std::string>& names) const;
  void require_complete() const;
  void require_steps(int64_t of_training) const;
  /// The elements that each shard has; an empty range where it has none.
  std::vector<FlatRange> saved(const std::string& state, const std::string& parameter) const;

  std::filesystem::path path_;
  std::string training_;
  ShardIndex index_;
  std::vector<StateTensor> running_;
  std::vector<SafetensorsStream> files_;               // by rank
  std::vector<std::map<std::string, int64_t>> first_;  // likewise: where each piece begins
};

/// The whole network with PyTorch's names and shapes, as --save would have written it after this
/// step. Has all parameters, but nothing of the optimizer.
std::vector<StateTensor> join_weights(const ShardedCheckpoint& checkpoint);
/// The optimizer's whole state, with the names and shapes of stage 05's checkpoints, for
/// write_checkpoint(). Empty if there is none.
std::vector<StateTensor> join_optimizer(const ShardedCheckpoint& checkpoint);

}  // namespace lockstep
