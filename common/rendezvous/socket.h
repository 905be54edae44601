#pragma once
// TCP sockets that close themselves, never raise SIGPIPE and never outlive exec. No socket blocks:
// all waiting is done in poll() with a deadline.

#include <poll.h>

#include <cstddef>
#include <span>
#include <string>

#include "common/core/error.h"
#include "common/rendezvous/address.h"
#include "common/rendezvous/deadline.h"
#include "common/system/descriptor.h"

namespace lockstep {

/// The connection was closed, by the other side or by the network.
class ConnectionClosed : public PeerLost {
 public:
  using PeerLost::PeerLost;
};

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}

  int fd() const { return fd_.get(); }
  bool is_open() const { return fd() >= 0; }
  void close() { fd_.close(); }

  /// What errors call the other side: "rank 2".
  void name_peer(std::string name) { peer_ = std::move(name); }
  const std::string& peer() const { return peer_; }

  /// This side's and the other side's address, as numbers. Throw EnvironmentError.
  Address local_address() const;
  Address peer_address() const;

  /// The number of bytes that were sent, or that came, without waiting; 0 if there is nothing to do
  /// now. Throw ConnectionClosed, "rank 2 closed the connection", with the system's reason if it
  /// has one.
  size_t send_some(std::span<const std::byte> bytes) const;
  size_t receive_some(std::span<std::byte> bytes) const;

 private:
  [[noreturn]] void fail_closed(int error) const;

  Descriptor fd_;
  std::string peer_ = "the other side";
};

/// Lets another thread end a wait in poll(): set() makes fd() readable, for good. Throws
/// EnvironmentError if the process has no descriptor left.
class WakeUp {
 public:
  WakeUp();
  int fd() const { return event_.get(); }
  void set() const;

 private:
  Descriptor event_;
};

/// Waits until one of `entries` is ready; false if the deadline passed first. poll() ignores an
/// entry whose descriptor is -1.
bool wait_ready(std::span<pollfd> entries, const Deadline& deadline);

}  // namespace lockstep
