#pragma once
// Ranks that share memory, all in this process.

#include <utility>

#include "tests/support/comm_trial.h"
#include "tests/support/shm_peers.h"

namespace lockstep::testing {

/// The ranks of a group that is connected by shared memory.
inline Ranks shm_ranks(int world_size, double timeout_seconds = 20) {
  auto peers = shm_peers(world_size, timeout_seconds);
  return Ranks(world_size,
               [&](int rank) { return make_shm_transport(std::move(peers[size_t(rank)])); });
}

}  // namespace lockstep::testing
