#pragma once
// Whole messages over sockets that do not block.

#include "common/comm/process/socket.h"

namespace lockstep {

/// One direction of a transfer; without bytes there is none.
struct Sending {
  const Socket* socket = nullptr;
  std::span<const std::byte> bytes{};
};
struct Receiving {
  const Socket* socket = nullptr;
  std::span<std::byte> bytes{};
};

/// Sends and receives at the same time, each as fast as its other side allows: two sides that send
/// to each other never wait for each other. Throws ConnectionClosed; PeerLost after the deadline,
/// naming the peer and what had come through, and when `cancelled` is set.
void transfer(Sending out, Receiving in, const Deadline& deadline,
              const WakeUp* cancelled = nullptr);

inline void send_all(const Socket& socket, std::span<const std::byte> bytes,
                     const Deadline& deadline) {
  transfer({&socket, bytes}, {}, deadline);
}
inline void receive_all(const Socket& socket, std::span<std::byte> bytes,
                        const Deadline& deadline) {
  transfer({}, {&socket, bytes}, deadline);
}

}  // namespace lockstep
