#pragma once
// Collectives between different GPUs of one process, by NCCL.

#include <string>
#include <vector>

#include "common/comm/nccl/nccl_queue.h"
#include "common/comm/single_process_world.h"

namespace lockstep {

/// The calls of a group are recorded while it is open, compared when it closes, and only then given
/// to NCCL, which would answer a disagreement with a hang or with wrong numbers. A rank that has
/// failed ends every wait of the host; only wait() also gives up on a rank that does not come.
class NcclWorld final : public SingleProcessWorld {
 public:
  /// Throws BadInput if two ranks are on one GPU, which NCCL does not serve; PeerLost if the ranks
  /// do not reach each other before the deadline.
  NcclWorld(std::vector<Device*> devices, double deadline_seconds);

  std::string description() const override;
  void wait(double timeout_seconds) override;

 private:
  void enqueue(const GroupCalls& calls) override;
  std::vector<NcclQueue::CallList> call_lists(const GroupCalls& calls);

  NcclQueue queue_;
};

}  // namespace lockstep
