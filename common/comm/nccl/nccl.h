#pragma once
// NCCL as the rest of the project sees it: two functions, of load_nccl.cpp or, in a build without
// NCCL, of no_nccl.cpp.

#include <memory>
#include <string>
#include <vector>

#include "common/comm/local_world.h"

namespace lockstep {

/// Seconds that the ranks have to find each other, and to connect for their first collective.
constexpr double kNcclDeadline = 60;

/// Why there is no NCCL: "this build has no NCCL", "no NVIDIA driver", ...; empty if there is.
std::string nccl_availability();

/// A world over different GPUs. Throws BadInput, naming both ranks and the GPU, if one is given
/// twice; EnvironmentError if there is no NCCL; PeerLost if the ranks do not find each other in
/// time.
std::unique_ptr<LocalWorld> make_nccl_world(const std::vector<Device*>& devices,
                                            double deadline_seconds = kNcclDeadline);

}  // namespace lockstep
