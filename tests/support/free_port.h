#pragma once
// The launcher's contract with ranks on this host, and a port for their store.

#include <vector>

#include "common/rendezvous/launch_contract.h"
#include "common/system/held_port.h"

namespace lockstep::testing {

/// A port on which no process listens, held as long as this process lives.
inline int free_port() {
  static auto& held = *new std::vector<HeldPort>;
  return held.emplace_back().number();
}

inline LaunchContract contract_of(int rank, int world_size, int port) {
  return {.rank = rank,
          .world_size = world_size,
          .local_rank = rank,
          .local_world_size = world_size,
          .master = {"127.0.0.1", port},
          .launcher = "torchrun",
          .run_id = ""};
}

}  // namespace lockstep::testing
