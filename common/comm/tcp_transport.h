#pragma once
// Collectives over plain connections, written out: for builds without Gloo, and for reading.

#include <memory>

#include "common/comm/host_communicator.h"

namespace lockstep {

class Store;

/// Connects this rank with all others of the store, which is not needed afterwards. A peer that is
/// silent for `timeout_seconds` is lost, as is one that takes longer for a whole message.
///
/// Reductions go round a ring in parts (see the top of tcp_transport.cpp), so each part is added
/// up once, in an order that the ring fixes: all ranks get the same bits, in every run with as many
/// ranks. Ranks whose counts differ wait for each other, or take one message for another:
/// LOCKSTEP_DEBUG=collectives finds this (watched_transport.h).
///
/// Throws PeerLost if a rank does not come. After an error all connections are closed, so that the
/// peers that wait for this rank learn of it.
std::shared_ptr<HostTransport> connect_tcp(Store& store, double timeout_seconds);

}  // namespace lockstep
