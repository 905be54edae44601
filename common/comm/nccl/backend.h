#pragma once
// The border between the programs and liblockstep_nccl.so, a library of its own for the same reason
// as the CUDA backend (kernels/cuda/backend.h): NCCL takes 200 MiB, and not every machine with CUDA
// has it.

#include "common/comm/nccl/nccl.h"

namespace lockstep {

/// The functions of nccl.h, as the library implements them.
struct NcclBackend {
  std::unique_ptr<SingleProcessWorld> (*make_world)(const std::vector<Device*>& devices,
                                                    double deadline_seconds);
  std::string (*unique_id)();
  std::unique_ptr<ProcessCommunicator> (*make_rank)(Device& device, int rank, int world_size,
                                                    const std::string& id, double timeout_seconds);
};

/// The one function that the library exports.
extern "C" void lockstep_nccl_backend(NcclBackend& backend);

}  // namespace lockstep
