#pragma once
// Collectives of ranks that are simulated (kernels/sim/). The ranks are alike: each makes the same
// calls at the same times, so one of them, rank 0, stands for all.

#include <memory>
#include <vector>

#include "common/comm/communicator.h"

namespace lockstep {

/// How many ranks there are, and how many of them share a host; rank 0 is the first of the first
/// host.
struct SimulatedRanks {
  int world_size = 1, per_host = 1;
};

/// Rank 0's membership of a group of these ranks. Calls take the time of their messages, one after
/// another, round a ring, each over its own link. Counts and known values (sim_host.h) become what
/// they would.
std::unique_ptr<Communicator> make_sim_communicator(const std::vector<int>& members, int per_host);

}  // namespace lockstep
