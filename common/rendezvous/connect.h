#pragma once
// How a connection comes about: one side listens and accepts, the other connects.

#include <optional>

#include "common/rendezvous/socket.h"

namespace lockstep {

/// Listens on a port of `address`, all interfaces if the host is empty. Throws EnvironmentError,
/// at once, with address, errno and its text, and a hint.
Socket listen_on(const Address& address);

/// Whether `host` is, in numbers, an address of one of this host's interfaces.
bool is_own_address(const std::string& host);

/// An incoming connection, if there is one. Throws EnvironmentError if the system has no room for
/// it.
std::optional<Socket> accept_from(const Socket& listener);

/// Connects, trying again until the deadline: the listener may only be about to start. Throws
/// EnvironmentError naming the address: at once for a host without an address, after the deadline
/// for a refused port and for no answer, each with its own text.
Socket connect_to(const Address& address, const Deadline& deadline);

}  // namespace lockstep
