#include "common/comm/nccl/backend.h"

#include "common/comm/nccl/nccl_communicator.h"
#include "common/comm/nccl/nccl_world.h"

namespace lockstep {
namespace {

std::unique_ptr<SingleProcessWorld> make_world(const std::vector<Device*>& devices,
                                               double deadline_seconds) {
  return std::make_unique<NcclWorld>(devices, deadline_seconds);
}

std::string unique_id() {
  const ncclUniqueId id = new_nccl_id();
  return std::string(id.internal, sizeof id.internal);
}

std::unique_ptr<ProcessCommunicator> make_rank(Device& device, int rank, int world_size,
                                               const std::string& id, double timeout_seconds) {
  return std::make_unique<NcclCommunicator>(device, rank, world_size, id, timeout_seconds);
}

}  // namespace

extern "C" void lockstep_nccl_backend(NcclBackend& backend) {
  backend = {make_world, unique_id, make_rank};
}

}  // namespace lockstep
