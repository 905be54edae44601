#pragma once
// TcpMesh: a TCP connection between every two ranks, to carry bytes where no library does. The
// transport over the mesh, connect_tcp(), is declared in host_transport.h.

#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "common/rendezvous/socket.h"

namespace lockstep {

class Store;

/// The bytes that one rank sends to another, or expects from it.
struct OutgoingBytes {
  int to = 0;
  std::span<const std::byte> bytes{};
};
struct IncomingBytes {
  int from = 0;
  std::span<std::byte> bytes{};
};

/// One rank's connections to all the others. Bytes arrive in the order in which they were sent. No
/// lengths are sent: both sides must know how many bytes come. For 0 bytes nothing is sent.
///
/// Every call throws a PeerLost that names the peer. Examples: "rank 2 closed the connection",
/// "rank 2 did not answer within 5 s: 100 of 4096 bytes came". Half a message may be on its way
/// then, so all later calls throw the same error. The connections are closed, so peers that wait
/// for this rank learn of the failure. One thread at a time.
class TcpMesh {
 public:
  /// Connects all ranks of the store; returns when all of them are connected, and have proven the
  /// job's key. A store has one mesh. Throws PeerLost naming a rank that left or did not come in
  /// time, EnvironmentError if a rank cannot be reached.
  TcpMesh(Store& store, double timeout_seconds);

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(peers_.size()); }
  /// Sets the other ranks' names in errors from now on.
  void name_peers(const std::function<std::string(int rank)>& name_of);
  /// As HostTransport::break_off().
  void break_off();
  /// The bytes that the connections have taken so far.
  int64_t bytes_sent() const { return bytes_sent_; }

  void send(int to, std::span<const std::byte> bytes, double timeout_seconds);
  void receive(int from, std::span<std::byte> bytes, double timeout_seconds);
  /// Sends and receives everything at the same time, any number of bytes: ranks that all exchange
  /// never wait for each other in a circle.
  void exchange(std::span<const OutgoingBytes> out, std::span<const IncomingBytes> in,
                double timeout_seconds);
  void exchange(int to, std::span<const std::byte> sent, int from, std::span<std::byte> received,
                double timeout_seconds);

 private:
  static Socket connect_to_lower(const Store& store, int lower, const std::string& where,
                                 const Deadline& deadline);
  const Socket& peer(int rank) const;

  int rank_;
  std::mutex closing_;
  std::vector<Socket> peers_;  // by rank; this rank's own is closed
  int64_t bytes_sent_ = 0;
  std::string broken_;  // why no further call can work
};

}  // namespace lockstep
