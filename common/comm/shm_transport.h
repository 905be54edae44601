#pragma once
// Collectives between the ranks of one host, through memory that they share.

#include <memory>
#include <string>

#include "common/comm/host_communicator.h"
#include "common/comm/shm_peers.h"
#include "common/core/error.h"

namespace lockstep {

class Store;

/// The ranks cannot share memory: they are on several hosts, or in containers that do not see each
/// other, or the system refuses the memory. Another transport may serve them.
class NoSharedMemory : public ErrorOfKind<NoSharedMemory> {
 public:
  using ErrorOfKind::ErrorOfKind;
};

/// Connects this rank with all others of the store, which is not needed afterwards. A peer that
/// does not do its part of a collective within `timeout_seconds` is lost. Sums have the same bits
/// on all ranks, in every run with as many ranks, and the bits of connect_tcp()'s.
///
/// Throws NoSharedMemory, on all ranks alike and with the reason of the first that has one;
/// PeerLost if a rank does not come.
std::shared_ptr<HostTransport> connect_shm(Store& store, double timeout_seconds);

/// The transport of a rank that is connected already.
std::shared_ptr<HostTransport> make_shm_transport(std::unique_ptr<ShmPeers> peers);

}  // namespace lockstep
