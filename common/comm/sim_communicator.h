#pragma once
// Collectives of ranks that are simulated (kernels/sim/). One rank stands for all that are like it
// (rendezvous/simulated_ranks.h).

#include <memory>
#include <vector>

#include "common/comm/communicator.h"
#include "common/rendezvous/store.h"

namespace lockstep {

/// Makes a membership of a group of these ranks. A call takes the time of its messages, one after
/// another, round a ring, each over its own link. Counts and known values (sim_host.h) get the
/// values that real calls would give them.
///
/// If all ranks are alike, the first rank stands for all. If not, each rank that stands for a kind
/// has a clock of its own, and these ranks meet in the store `unlike`. Then a call begins when the
/// last rank that it concerns has come: the last of all ranks, or of sender and receiver. The call
/// ends on these ranks at the same time. So a send lasts until its receiver has come and has the
/// message. The host's thread waits for the others' at every call; its clock does not.
std::unique_ptr<Communicator> make_sim_communicator(const std::vector<int>& members, int per_host,
                                                    std::shared_ptr<Store> unlike = nullptr,
                                                    double timeout_seconds = 300);

}  // namespace lockstep
