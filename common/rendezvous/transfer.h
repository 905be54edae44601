#pragma once
// Whole messages over sockets that do not block.

#include "common/rendezvous/socket.h"

namespace lockstep {

/// One message of a transfer; none is sent if there are no bytes.
struct Sending {
  const Socket* socket = nullptr;
  std::span<const std::byte> bytes{};
};
struct Receiving {
  const Socket* socket = nullptr;
  std::span<std::byte> bytes{};
};

/// Sends and receives everything at the same time, each message as fast as its other side allows:
/// two sides that send to each other never wait for each other. The messages of one socket and
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
