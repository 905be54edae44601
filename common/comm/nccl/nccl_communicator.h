#pragma once
// Collectives between GPUs of different processes, by NCCL: one rank in each.

#include <string>

#include "common/comm/nccl/nccl_queue.h"
#include "common/comm/process_communicator.h"

namespace lockstep {

/// A collective is one NCCL group; transfers that follow each other on a stream are another. Larger
/// groups would have to be the same on all ranks, which no rank alone can know.
class NcclCommunicator final : public ProcessCommunicator {
 public:
  /// Throws BadInput for an invalid id; PeerLost if the other ranks do not come within
  /// `timeout_seconds`, which is also how long a collective waits for them.
  NcclCommunicator(Device& device, int rank, int world_size, const std::string& id,
                   double timeout_seconds);

 private:
  void enqueue(Stream stream, const std::vector<Call>& together, FlightCall flight) override;

  Device& device_;
  std::string broken_;  // why no further call can be made
  NcclQueue queue_;
};

}  // namespace lockstep
