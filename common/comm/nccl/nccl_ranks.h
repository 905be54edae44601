#pragma once
// The ranks of one process as NCCL knows them, all ranks of a group or some: an ncclComm_t each,
// from birth to a death that does not hang.

#include <nccl.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "common/core/device.h"

namespace lockstep {

/// Which ranks of a group a process has: devices[i] is that of rank first + i.
struct NcclMembers {
  std::vector<Device*> devices;
  int first = 0, world_size = 0;
  ncclUniqueId id{};
};
/// The id of a new group. Throws PeerLost if NCCL has none.
ncclUniqueId new_nccl_id();

/// Polls until `ready()` holds; false if it does not within that many seconds.
bool poll(double seconds, const std::function<bool()>& ready);

/// Throws PeerLost, "rank 1 (cuda:1): ncclAllReduce: ..." with NCCL's own words, unless the call
/// succeeded or continues in the background. `who` is what the text begins with.
void check_nccl(ncclResult_t status, const char* call, const std::string& who,
                ncclComm_t comm = nullptr);

/// Non-blocking communicators: no call waits for another rank for ever. Where a call returns
/// ncclInProgress, NCCL continues in the background, and the communicator must be left alone until
/// it is ready.
///
/// This costs a thread of NCCL's for each group, and blocking ones would not. But there the set-up,
/// and every first use of an algorithm or a peer, waits for the other ranks inside the call.
/// Nothing may end that: ncclCommAbort from another thread frees the communicator under the call
/// (for a non-blocking one it first joins NCCL's thread), and NCCL's user guide allows one thread
/// at a time.
class NcclRanks {
 public:
  /// Throws PeerLost if the ranks have not found each other before the deadline, or NCCL failed.
  NcclRanks(NcclMembers members, double deadline_seconds);
  /// Lets the calls in flight end; where they do not, aborts them.
  ~NcclRanks();
  NcclRanks(const NcclRanks&) = delete;
  NcclRanks& operator=(const NcclRanks&) = delete;

  int world_size() const { return members_.world_size; }
  ncclComm_t comm(int rank) const { return comms_[rank - members_.first]; }
  /// "rank 1 (cuda:1)"
  std::string name(int rank) const;
  /// The ranks of other processes: "rank 1", "one of the other 3 ranks"; empty if there are none.
  std::string others() const;

  /// Calls `issue` inside ncclGroupStart and ncclGroupEnd, and returns when NCCL has enqueued its
  /// calls on their streams. Throws PeerLost if that fails or takes longer than the deadline.
  void group(const std::function<void()>& issue) const;
  /// What NCCL has noticed in the background: "rank 1 (cuda:1): remote process exited ..."; empty
  /// if nothing.
  std::string failure() const;
  /// Ends what is in flight on all ranks. The communicators are gone then.
  void abort();

 private:
  void initialize();
  void await_ready(const char* call) const;
  ncclResult_t state(size_t index) const;
  std::string name_at(size_t index) const { return name(members_.first + static_cast<int>(index)); }
  bool finalize() const;

  NcclMembers members_;
  double deadline_seconds_;
  std::vector<ncclComm_t> comms_;  // empty after abort()
};

}  // namespace lockstep
