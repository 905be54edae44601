#pragma once
// NCCL as the rest of the project sees it: functions of load_nccl.cpp or, in a build without NCCL,
// of no_nccl.cpp.

#include <memory>
#include <string>
#include <vector>

#include "common/comm/process_communicator.h"
#include "common/comm/single_process_world.h"

namespace lockstep {

/// Seconds that the ranks may take to find each other, and to connect for their first collective.
constexpr double kNcclDeadline = 60;

/// Why there is no NCCL: "this build has no NCCL", "no NVIDIA driver", ...; empty if there is.
std::string nccl_availability();

/// A world over different GPUs. Throws BadInput, naming both ranks and the GPU, if one is given
/// twice; EnvironmentError if there is no NCCL; PeerLost if the ranks do not find each other in
/// time.
std::unique_ptr<SingleProcessWorld> make_nccl_world(const std::vector<Device*>& devices,
                                                    double deadline_seconds = kNcclDeadline);

/// The id of a group of processes: rank 0 makes it and leaves it in the store for all. Bytes, not
/// text. Throws EnvironmentError if there is no NCCL.
std::string nccl_unique_id();

/// Rank `rank` of `world_size` processes, on a GPU that no other rank uses. Returns when all ranks
/// have called it with the same id. A call waits on the GPU for the other ranks. The host, while it
/// waits for a stream of the device, ends the call with PeerLost: at once if NCCL finds a rank
/// gone, else after `timeout_seconds` of silence. Only the thread that made the communicator may
/// call and wait. Throws PeerLost if the others have not come within `timeout_seconds`,
/// EnvironmentError if there is no NCCL. Must be destroyed before the device.
std::unique_ptr<ProcessCommunicator> make_nccl_rank(Device& device, int rank, int world_size,
                                                    const std::string& id, double timeout_seconds);

}  // namespace lockstep
