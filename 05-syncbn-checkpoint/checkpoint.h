#pragma once
// A folder of checkpoints: files that PyTorch can load, and no crash can corrupt.
//
//   step-000000938.safetensors             the network, under PyTorch's names, and TrainingState
//   step-000000938.optimizer.safetensors   the optimizer's state, if it has any:
//                                          "momentum.conv1.weight"; of Adam and AdamW
//                                          "exp_avg.conv1.weight", "exp_avg_sq.conv1.weight", and
//                                          "step.conv1.weight", one number: its updates so far
//   step-000000938.rank-1-of-4.safetensors in place of that: a shard (stage 06)
//
// Two files, since PyTorch's load_state_dict() refuses names that the network does not have. The
// first one is the checkpoint: it holds the checksum of the other, and is written last and removed
// first. So at any moment every checkpoint is complete or not there.
//
// One run at a time may write to a directory.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "05-syncbn-checkpoint/training_state.h"
#include "common/nn/optimizer.h"
#include "common/nn/state_dict.h"
#include "common/system/descriptor.h"

namespace lockstep {

// --- The directory -------------------------------------------------------------------------------

/// DIR/step-000000938.safetensors
std::filesystem::path checkpoint_path(const std::filesystem::path& directory, int64_t steps);
/// The file of the optimizer's state that belongs to `checkpoint`.
std::filesystem::path optimizer_path(const std::filesystem::path& checkpoint);
/// The file of rank `rank` of `world_size` that belongs to `checkpoint`.
std::filesystem::path shard_path(const std::filesystem::path& checkpoint, int rank, int world_size);

/// The steps of the checkpoints in a directory, whole or not, the newest first. Empty if there is
/// no directory; throws EnvironmentError if the directory cannot be read.
std::vector<int64_t> find_checkpoints(const std::filesystem::path& directory);

/// The newest of the checkpoints `found` in a directory for which read() does not throw. `warn`
/// gets a line for each newer one, with the reason. Returns nothing if there are no checkpoints;
/// throws BadInput if there are some, but none can be read. Passes on the error of a lost rank.
std::optional<int64_t> newest_readable(
    const std::filesystem::path& directory, const std::vector<int64_t>& found,
    const std::function<void(const std::filesystem::path&)>& read,
    const std::function<void(const std::string&)>& warn);

/// Keeps other runs out of a directory: they would remove what this run saves. Locks the file .lock
/// in it, which only this user may open. (Everyone who may read a directory could lock the
/// directory itself.) The lock ends with the process; this object removes the file. Some file
/// systems have no locks. Makes a directory that is not there; removes it again if nothing was
/// saved to it.
class DirectoryLock {
 public:
  /// Throws BadInput where another run has the lock, or the file belongs to another user; throws
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

/// Removes what unfinished saves have left: temporary files, and files without their checkpoint.
/// Files that cannot be removed stay.
void remove_leftovers(const std::filesystem::path& directory);

/// Removes the files that belong to a checkpoint, except those in `keep`. Throws EnvironmentError.
void remove_companions(const std::filesystem::path& checkpoint,
                       const std::set<std::filesystem::path>& keep = {});

/// Removes the checkpoints up to step `steps` except the `keep` newest of them. Those of the steps
/// `damaged` stay and do not count. A checkpoint's own file is removed first, so no checkpoint is
/// ever there without its other files. Throws EnvironmentError.
void remove_old_checkpoints(const std::filesystem::path& directory, int64_t steps, int64_t keep,
                            const std::set<int64_t>& damaged = {});

// --- What is in a checkpoint ---------------------------------------------------------------------

/// The key of TrainingState in a checkpoint's free text.
inline constexpr const char* kTrainingKey = "lockstep.training";

/// The objects that training changes. All must outlive this object.
struct Trained {
  Module& network;  // not the wrapper around it: its names are those of the files
  const FlatParameters& parameters;
  const Optimizer& optimizer;
};

/// Throws NonFinite if any step's loss or gradient was not finite. Waits for the last step.
void require_good_steps(const Optimizer& optimizer, const std::filesystem::path& directory);
/// Throws NonFinite, with the tensor's name, for a value that is not finite. A run can go wrong
/// before its loss shows it: running variances overflow first.
void require_finite(const std::vector<StateTensor>& state, const TrainingState& training);
/// PyTorch's name, in files, for how often Adam or AdamW has updated a parameter.
inline constexpr const char* kStep = "step";
/// The counts of updates, in the order of optimizer.parameters(); empty for SGD. `saved` has them
/// by name; older files have none: there all parameters took part in all of `training`'s steps.
/// Throws BadInput, naming the parameter, for counts that do not fit the steps of training.
std::vector<int64_t> steps_of(const Optimizer& optimizer,
                              const std::map<std::string, double>& saved,
                              const TrainingState& training);
/// Throws BadInput unless these are the optimizer's states ("momentum"; "exp_avg", "exp_avg_sq").
void require_same_states(const std::filesystem::path& path, const std::set<std::string>& saved,
                         const Optimizer& optimizer);

// --- Saving --------------------------------------------------------------------------------------

/// Writes a checkpoint of the state after everything enqueued so far; replaces one of the same
/// step. Makes the directory if there is none. Returns the bytes of the files. Throws NonFinite,
/// with the tensor's name, before it writes anything that is not finite. Throws EnvironmentError
/// where writing fails: then the earlier checkpoints are still there, and no part of a new one.
/// Makes these of the ten steps of a save (README.md):
///   3. remove_leftovers(): files that a killed process may have left;
///   4. the optimizer's file, then the network's, each by steps 5 to 8 (write_file_atomically()):
///      the checkpoint exists from the moment of the second rename.
int64_t save_checkpoint(const std::filesystem::path& directory, const Trained& trained,
                        const TrainingState& state);
/// The same for a state in host memory, whose tensors have the names of the files. `optimizer` is
/// empty if the optimizer has no state.
int64_t write_checkpoint(const std::filesystem::path& directory,
                         const std::vector<StateTensor>& network,
                         const std::vector<StateTensor>& optimizer, const TrainingState& state);

// --- Loading -------------------------------------------------------------------------------------

/// The contents of a checkpoint's files, in host memory.
struct Checkpoint {
  std::filesystem::path path{};
  std::string training{};                // for TrainingState::from_json()
  std::vector<StateTensor> network{};    // for load_state_dict()
  std::vector<StateTensor> optimizer{};  // for load_flat_state_dict(); empty: it has no state
};

/// Reads both files and compares all checksums. Throws BadInput for files that are damaged, do not
/// belong together, or are no checkpoint; EnvironmentError where reading fails.
Checkpoint read_checkpoint(const std::filesystem::path& path);

/// The newest checkpoint of the directory that can be read. `warn` gets a line for each newer one,
/// with the reason why that cannot be read. Returns nothing if there are no checkpoints; throws
/// BadInput if there are some, but none can be read.
std::optional<Checkpoint> newest_checkpoint(const std::filesystem::path& directory,
                                            const std::function<void(const std::string&)>& warn);

/// Throws BadInput for the state of another optimizer. Also throws BadInput, listing the tensors,
/// if some are missing or unexpected, or have another dtype or shape.
void require_fitting(const Checkpoint& checkpoint, const Trained& trained);
/// Makes the same check, then loads the network and the optimizer's state from the checkpoint.
void restore(const Checkpoint& checkpoint, const Trained& trained);

}  // namespace lockstep
