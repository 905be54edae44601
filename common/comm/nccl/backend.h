#pragma once
// The border between the programs and liblockstep_nccl.so, a library of its own for the same reason
// as the CUDA backend (kernels/cuda/backend.h): NCCL has 200 MiB, and is not everywhere where CUDA
// is.

#include <vector>

#include "common/comm/local_world.h"

namespace lockstep {

/// The one function that the library exports: make_nccl_world() without the ownership, which C
/// linkage does not carry.
extern "C" LocalWorld* lockstep_make_nccl_world(const std::vector<Device*>& devices,
                                                double deadline_seconds);

}  // namespace lockstep
