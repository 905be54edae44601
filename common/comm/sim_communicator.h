#pragma once
// Collectives of ranks that are simulated (kernels/sim/). One rank stands for all that are like it
// (rendezvous/simulated_ranks.h).

#include <memory>
#include <vector>

#include "common/comm/communicator.h"
#include "common/rendezvous/store.h"

namespace lockstep {

/// Membership of a group of these ranks. Calls take the time of their messages, one after another,
/// round a ring, each over its own link. Counts and known values (sim_host.h) get the values that
/// real calls would give them.
///
/// The first rank stands for all where they are alike. Where they are not, each of those that stand
/// for a kind has a clock of its own, and they meet in the store `unlike`. A call then begins when
/// the last of the ranks that it concerns has come to it: all of them, or those that send and
/// receive. It ends on all of them at the same time. So a send lasts until its receiver has come
/// and has the message. The host's thread waits for the others' at every call, its clock does not.
std::unique_ptr<Communicator> make_sim_communicator(const std::vector<int>& members, int per_host,
                                                    std::shared_ptr<Store> unlike = nullptr,
                                                    double timeout_seconds = 300);

}  // namespace lockstep
