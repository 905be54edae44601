#pragma once
// Connections that do not block, by TCP and between the processes of one host: addresses,
// deadlines, how a connection comes about, and whole messages. Sockets close themselves, never
// raise SIGPIPE and never outlive exec. All waiting is done in poll() with a deadline.

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "common/core/error.h"
#include "common/system/descriptor.h"

namespace lockstep {

// --- Addresses ----------------------------------------------------------------------------------

/// The host and the port where something listens.
struct Address {
  std::string host;  // a name or a number; IPv6 without brackets
  int port = 0;      // 0 to listen: the system chooses

  /// "node7:29500", "[::1]:29500"
  std::string text() const;
  bool operator==(const Address&) const = default;
};

/// Reads the address that Address::text() wrote. Accepts brackets around a host even if they are
/// not needed. `what` names the address in errors. Throws BadInput.
Address parse_address(std::string_view text, const std::string& what);

/// "::1" for "[::1]"; any other host stays as it is.
std::string without_brackets(std::string_view host);

/// True for an address that is reachable only from its own host: localhost, 127.x.y.z, ::1.
bool is_loopback(std::string_view host);

constexpr int kLargestPort = 65535;

// --- Deadlines ----------------------------------------------------------------------------------

/// A point in time, and what poll() needs to know about it. With it nobody waits for ever.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// `seconds` from now; 0 or less, or NaN, has already passed.
  explicit Deadline(double seconds)
      : seconds_(seconds > 0 ? std::min(seconds, kLongest) : 0),
        time_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                 std::chrono::duration<double>(seconds_))) {}

  /// The seconds to which the deadline was set, for error texts.
  double seconds() const { return seconds_; }
  Clock::time_point time() const { return time_; }
  bool passed() const { return Clock::now() >= time_; }
  /// The seconds until the deadline; 0 once it has passed.
  double seconds_left() const {
    return std::max(0.0, std::chrono::duration<double>(time_ - Clock::now()).count());
  }
  /// The timeout that poll() takes, rounded up: a loop must not spin through the last millisecond.
  int poll_ms() const { return static_cast<int>(std::ceil(std::min(seconds_left(), 1e6) * 1e3)); }

 private:
  static constexpr double kLongest = 1e8;  // three years; more would overflow the clock's count
  double seconds_;
  Clock::time_point time_;
};

/// The deadline that comes first.
inline const Deadline& earlier(const Deadline& a, const Deadline& b) {
  return a.time() < b.time() ? a : b;
}

// --- Sockets ------------------------------------------------------------------------------------

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
  /// Ends the connection for both sides. A thread that waits for the connection learns of its end.
  void shut_down() const;

  /// Sets the name of the other side in errors: "rank 2".
  void name_peer(std::string name) { peer_ = std::move(name); }
  const std::string& peer() const { return peer_; }

  /// This side's and the other side's address, as numbers. Throw EnvironmentError.
  Address local_address() const;
  Address peer_address() const;

  /// Send or receive what is possible without waiting. Return the number of bytes; 0 if nothing is
  /// possible now. Throw ConnectionClosed, "rank 2 closed the connection", with the system's reason
  /// if it has one.
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

// --- How a connection comes about ---------------------------------------------------------------
// One side listens and accepts, the other connects.

/// Listens on a port of `address`, all interfaces if the host is empty. Throws EnvironmentError,
/// at once, with address, errno and its text, and a hint.
Socket listen_on(const Address& address);

/// Whether `host` is, in numbers, an address of one of this host's interfaces.
bool is_own_address(const std::string& host);

/// Accepts an incoming connection, if there is one. Throws EnvironmentError if the system has no
/// room for it.
std::optional<Socket> accept_from(const Socket& listener);

/// Connects, trying again until the deadline: the listener may only be about to start. Throws
/// EnvironmentError naming the address. That is at once for a host without an address, after the
/// deadline for a refused port or no answer, each with its own text.
Socket connect_to(const Address& address, const Deadline& deadline);

// --- Between the processes of one host ----------------------------------------------------------
// The names of such sockets are in no file system ("abstract"), so nothing is left behind; and they
// carry descriptors, which no other connection does.

/// Listens under a name of at most 100 letters; accept_from() takes the connections. Processes in
/// another network namespace (a container) do not find it. Throws EnvironmentError.
Socket listen_under(const std::string& name);

/// Connects with `peer` ("rank 2"), who listens under that name. Throws EnvironmentError, at once
/// if nobody listens there.
Socket connect_under(const std::string& name, const std::string& peer, const Deadline& deadline);

/// Whether the other side is a process of this process's user.
bool has_same_user(const Socket& socket);

/// Sends a descriptor, which the other side gets as one of its own. Throws ConnectionClosed, or
/// EnvironmentError where the system does not let it through.
void send_descriptor(const Socket& socket, const Descriptor& descriptor);
/// Throws ConnectionClosed; PeerLost after the deadline, EnvironmentError if bytes came instead.
Descriptor receive_descriptor(const Socket& socket, const Deadline& deadline);

// --- Whole messages -----------------------------------------------------------------------------

/// One message of a transfer. A message without bytes is not sent.
struct Sending {
  const Socket* socket = nullptr;
  std::span<const std::byte> bytes{};
};
struct Receiving {
  const Socket* socket = nullptr;
  std::span<std::byte> bytes{};
};

/// Sends and receives everything at the same time, each message as fast as its other side allows.
/// Two sides that send to each other never wait for each other. The messages of one socket and
/// direction keep their order. Throws ConnectionClosed; PeerLost after the deadline, naming a peer
/// and how much had arrived.
void transfer(std::span<const Sending> out, std::span<const Receiving> in,
              const Deadline& deadline);

inline void send_all(const Socket& socket, std::span<const std::byte> bytes,
                     const Deadline& deadline) {
  const Sending out{&socket, bytes};
  transfer({&out, 1}, {}, deadline);
}
inline void receive_all(const Socket& socket, std::span<std::byte> bytes,
                        const Deadline& deadline) {
  const Receiving in{&socket, bytes};
  transfer({}, {&in, 1}, deadline);
}

}  // namespace lockstep
