#pragma once
// The files of checkpoints in a directory, whatever is in them.
//
//   step-000000938.safetensors               the checkpoint: it is there as long as this file is
//   step-000000938.optimizer.safetensors     what else belongs to it: stage 05's second file,
//   step-000000938.rank-1-of-4.safetensors   stage 06's shards
//
// The first is written last and removed first. So at any moment every checkpoint is complete or not
// there.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/system/descriptor.h"

namespace lockstep {

/// DIR/step-000000938.safetensors
std::filesystem::path checkpoint_path(const std::filesystem::path& directory, int64_t steps);
/// The file of the optimizer's state that belongs to it.
std::filesystem::path optimizer_path(const std::filesystem::path& checkpoint);
/// The file of rank `rank` of `world_size` that belongs to it.
std::filesystem::path shard_path(const std::filesystem::path& checkpoint, int rank, int world_size);

/// A checkpoint found in a directory, whole or not.
struct FoundCheckpoint {
  int64_t steps = 0;
  std::filesystem::path path{};
};
/// The newest first. Empty if the directory is not there; throws EnvironmentError for one that
/// cannot be read.
std::vector<FoundCheckpoint> find_checkpoints(const std::filesystem::path& directory);

/// The newest of the checkpoints `found` in a directory for which read() does not throw. `warn`
/// gets a line for each newer one, with the reason. Returns nothing if there are no checkpoints;
/// throws BadInput if there are some, but none can be read; passes on that a rank was lost.
std::optional<FoundCheckpoint> newest_readable(
    const std::filesystem::path& directory, const std::vector<FoundCheckpoint>& found,
    const std::function<void(const std::filesystem::path&)>& read,
    const std::function<void(const std::string&)>& warn);

/// Keeps other runs out of a directory, which would remove what this one saves: a lock on the file
/// .lock in it, which only this user may open. (A lock on the directory could be had by everyone
/// who may read it.) It ends with the process, and the file goes with this object; file systems
/// without locks have none. A directory that is not there is made, and goes with this object, too,
/// if nothing was saved to it.
class DirectoryLock {
 public:
  /// Throws BadInput where another run has the lock, or its file is another user's;
  /// EnvironmentError where the directory cannot be made.
  explicit DirectoryLock(const std::filesystem::path& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  std::filesystem::path path_{};
  std::vector<std::filesystem::path> made_{};  // the deepest first
  Descriptor file_{};
};

/// Removes temporary files, and files whose checkpoint is not there: what saves that did not finish
/// have left. What cannot be removed stays.
void remove_leftovers(const std::filesystem::path& directory);

/// Removes the files that belong to a checkpoint, except those in `keep`. Throws EnvironmentError.
void remove_companions(const std::filesystem::path& checkpoint,
                       const std::set<std::filesystem::path>& keep = {});

/// Removes the checkpoints up to step `steps` except the `keep` newest of them. Those of the steps
/// `damaged` stay and do not count. A checkpoint's own file is removed first, so that none is ever
/// there without what belongs to it. Throws EnvironmentError.
void remove_old_checkpoints(const std::filesystem::path& directory, int64_t steps, int64_t keep,
                            const std::set<int64_t>& damaged = {});

}  // namespace lockstep
