#pragma once
// NCCL as the rest of the project sees it. It is in liblockstep_nccl.so, a library of its own for
// the same reason as the CUDA backend (kernels/cuda/cuda.h): NCCL takes 200 MiB, and not every
// machine with CUDA has it. load_libraries.cpp loads it.

#include <memory>
#include <string>

#include "common/comm/communicator.h"

namespace lockstep {

/// Why there is no NCCL: "this build has no NCCL", "no NVIDIA driver", ...; empty if there is.
std::string nccl_availability();

/// Makes the id of a group of ranks: bytes, not text. Rank 0 makes it and leaves it in the store
/// for all. Throws EnvironmentError if there is no NCCL.
std::string nccl_unique_id();

/// Makes rank `rank` of `world_size`, on a GPU that no other rank uses. Returns when all ranks have
/// called this function with the same id. A call may wait for the other ranks, on the host and on
/// the GPU. A watcher thread ends the process by a PeerLost that nobody catches. The end comes at
/// once if NCCL finds a rank gone, else after `timeout_seconds` of silence (nccl_watcher.h). It
/// also watches this function. A call that NCCL refuses throws PeerLost. Only the thread that made
/// the communicator may call. Throws BadInput if `id` is not an id, EnvironmentError if there is no
/// NCCL. Must be destroyed before the device.
std::unique_ptr<Communicator> make_nccl_rank(Device& device, int rank, int world_size,
                                             const std::string& id, double timeout_seconds);

/// The last two functions, as the library has them.
struct NcclBackend {
  std::string (*unique_id)();
  std::unique_ptr<Communicator> (*make_rank)(Device& device, int rank, int world_size,
                                             const std::string& id, double timeout_seconds);
};
/// The one function that the library exports.
extern "C" void lockstep_nccl_backend(NcclBackend& backend);

}  // namespace lockstep
