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

/// The id of a group of ranks: rank 0 makes it and leaves it in the store for all. Bytes, not text.
/// Throws EnvironmentError if there is no NCCL.
std::string nccl_unique_id();

/// Rank `rank` of `world_size`, on a GPU that no other rank uses. Returns when all ranks have
/// called it with the same id. A call may wait for the other ranks, on the host as well as on the
/// GPU. A thread watches, and ends the process by a PeerLost that nobody catches: at once if NCCL
/// finds a rank gone, else after `timeout_seconds` of silence, here, too (nccl_watcher.h). A call
/// that NCCL refuses throws PeerLost. Only the thread that made the communicator may call. Throws
/// BadInput for what is no id, EnvironmentError if there is no NCCL. Must be destroyed before the
/// device.
std::unique_ptr<Communicator> make_nccl_rank(Device& device, int rank, int world_size,
                                             const std::string& id, double timeout_seconds);

/// The last two, as the library has them.
struct NcclBackend {
  std::string (*unique_id)();
  std::unique_ptr<Communicator> (*make_rank)(Device& device, int rank, int world_size,
                                             const std::string& id, double timeout_seconds);
};
/// The one function that the library exports.
extern "C" void lockstep_nccl_backend(NcclBackend& backend);

}  // namespace lockstep
