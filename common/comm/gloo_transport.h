#pragma once
// Gloo: the library that carries PyTorch's collectives between CPU processes. Two functions, of
// load_gloo.cpp or, in a build without Gloo, of no_gloo.cpp. What they load is gloo_transport.cpp,
// which connects the ranks, and gloo_collectives.cpp, whose calls the connected ranks run.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/comm/host_communicator.h"

namespace lockstep {

/// Where each rank of a group leaves what the others need to connect.
struct RendezvousStore {
  std::function<void(const std::string& key, const std::string& value)> set;
  /// Waits until some rank has set the key. Throws when that takes too long.
  std::function<std::string(const std::string& key)> get;
};

/// Why there is no Gloo: "this build has no Gloo"; empty if there is. Loads it.
std::string gloo_availability();

/// Connects this rank with all others by `store`, over the network interface that has the address
/// `host`. A peer that is silent for `timeout_seconds` is lost. Uses ring algorithms, so that with
/// the same number of ranks sums have the same bits in every run.
///
/// Throws EnvironmentError if there is no Gloo, PeerLost if the ranks do not find each other. A
/// mistake that Gloo notices in its own thread (counts that differ among the ranks) ends the
/// process.
std::shared_ptr<HostTransport> connect_gloo(int rank, int world_size, const RendezvousStore& store,
                                            const std::string& host, double timeout_seconds);

/// The one function that the library exports.
extern "C" void lockstep_connect_gloo(std::shared_ptr<HostTransport>& connected, int rank,
                                      int world_size, const RendezvousStore& store,
                                      const std::string& host, double timeout_seconds);

}  // namespace lockstep
