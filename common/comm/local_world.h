#pragma once
// All ranks of a group in one process, driven by one host thread.

#include <memory>
#include <vector>

#include "common/comm/communicator.h"
#include "common/core/device.h"

namespace lockstep {

/// The communicators of all ranks, rank r on device r. One host thread issues the calls of all
/// ranks, inside a CollectiveGroup.
class LocalWorld {
 public:
  virtual ~LocalWorld() = default;

  int size() const { return static_cast<int>(devices_.size()); }
  Communicator& rank(int rank) { return *ranks_[rank]; }
  /// "in-process" or "NCCL 2.28.9".
  virtual std::string description() const = 0;

  /// Checks the calls of the open group and enqueues them. Throws PeerLost, naming the ranks and
  /// what each of them called, if they differ in number, operation, element type or count; nothing
  /// is enqueued then. After that, or where a rank failed, the world is unusable: every further
  /// group throws the same error.
  virtual void close_group() = 0;
  /// Blocks the host until all ranks have finished the groups so far. Throws PeerLost naming the
  /// ranks that did not come within `timeout_seconds`, and the group they are missing from.
  virtual void wait(double timeout_seconds) = 0;
  virtual void open_group() = 0;
  /// Forgets the calls of the open group.
  virtual void abandon_group() = 0;

 protected:
  explicit LocalWorld(std::vector<Device*> devices) : devices_(std::move(devices)) {}

  std::vector<Device*> devices_;
  std::vector<std::unique_ptr<Communicator>> ranks_;
};

/// The calls made within its lifetime belong together: none of them starts before the last one is
/// issued (ncclGroupStart, ncclGroupEnd). Its end throws what close_group() throws, but nothing
/// while an exception is on its way: the calls are then forgotten.
class CollectiveGroup {
 public:
  explicit CollectiveGroup(LocalWorld& world);
  ~CollectiveGroup() noexcept(false);
  CollectiveGroup(const CollectiveGroup&) = delete;
  CollectiveGroup& operator=(const CollectiveGroup&) = delete;

 private:
  LocalWorld& world_;
  int exceptions_;  // on their way when the group was opened
};

/// How ranks in one process meet.
enum class LocalBackend { automatic, in_process, nccl };

/// A world over these devices, rank r on the r-th. `automatic`: NCCL for several different GPUs
/// where this build has it, else in-process: CPU devices, or replicas that share one GPU. Throws
/// BadInput for devices that a backend cannot serve together (naming both ranks and the GPU where
/// NCCL is asked to serve one GPU twice), EnvironmentError where NCCL is asked for and absent.
std::unique_ptr<LocalWorld> make_local_world(const std::vector<Device*>& devices,
                                             LocalBackend backend = LocalBackend::automatic);

}  // namespace lockstep
