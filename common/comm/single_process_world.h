#pragma once
// All ranks of a group in one process, driven by one host thread.

#include <memory>
#include <vector>

#include "common/comm/group_recorder.h"

namespace lockstep {

/// The communicators of all ranks, rank r on device r. One host thread issues the calls of all
/// ranks, inside a CollectiveGroup.
class SingleProcessWorld {
 public:
  virtual ~SingleProcessWorld() = default;

  int world_size() const { return static_cast<int>(devices_.size()); }
  Communicator& communicator(int rank) { return *ranks_[rank]; }
  /// Bytes that all ranks have given to others so far, in the groups that are closed.
  int64_t bytes_sent() const;
  /// "in-process" or "NCCL 2.28.9".
  virtual std::string description() const = 0;

  void open_group() { recorder_.open(); }
  /// Checks the calls of the open group and enqueues them. Throws PeerLost, naming the ranks and
  /// what each of them called, if they differ in number, operation, element type or count; nothing
  /// is enqueued then. After that, or where a rank failed, the world is unusable: every further
  /// group throws the same error.
  void close_group() { enqueue(recorder_.close()); }
  /// Forgets the calls of the open group.
  void abandon_group() { recorder_.abandon(); }
  /// Blocks the host until all ranks have finished the groups so far. Throws PeerLost naming the
  /// ranks that did not come within `timeout_seconds`, and the group they are missing from.
  virtual void wait(double timeout_seconds) = 0;

 protected:
  /// `counted_in`: where enqueue() counts what the ranks send (SentBytes).
  SingleProcessWorld(std::vector<Device*> devices, const std::string& counted_in)
      : devices_(std::move(devices)),
        recorder_(devices_, counted_in),
        ranks_(recorder_.communicators()) {}
  /// Enqueues the calls of a group, on which the ranks agree, in the order of in_order(), and
  /// counts what each rank sends.
  virtual void enqueue(const GroupCalls& calls) = 0;

  std::vector<Device*> devices_;
  GroupRecorder recorder_;

 private:
  std::vector<std::unique_ptr<Communicator>> ranks_;
};

/// The calls made while it lives belong together: none of them starts before the last one is issued
/// (ncclGroupStart, ncclGroupEnd), and then they take effect in the order in which they were made.
/// Its destructor throws what close_group() throws, but nothing while an exception is being thrown:
/// the calls are then forgotten.
class CollectiveGroup {
 public:
  explicit CollectiveGroup(SingleProcessWorld& world);
  ~CollectiveGroup() noexcept(false);
  CollectiveGroup(const CollectiveGroup&) = delete;
  CollectiveGroup& operator=(const CollectiveGroup&) = delete;

 private:
  SingleProcessWorld& world_;
  int exceptions_;  // uncaught when the group was opened
};

/// How ranks in one process meet.
enum class LocalBackend { automatic, in_process, nccl };

/// A world over these devices, rank r on the r-th. `automatic`: NCCL for several different GPUs
/// where this build has it, else in-process: CPU devices, or replicas that share one GPU. Throws
/// BadInput for devices that a backend cannot serve together (naming both ranks and the GPU where
/// NCCL is asked to serve one GPU twice), EnvironmentError where NCCL is asked for and missing.
std::unique_ptr<SingleProcessWorld> make_single_process_world(
    const std::vector<Device*>& devices, LocalBackend backend = LocalBackend::automatic);

}  // namespace lockstep
