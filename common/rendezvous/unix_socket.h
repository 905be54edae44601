#pragma once
// Sockets between the processes of one host. Their names are in no file system ("abstract"), so
// nothing is left behind; and they carry descriptors, which no other connection does.

#include <string>

#include "common/rendezvous/socket.h"

namespace lockstep {

/// Listens under a name of at most 100 letters; accept_from() takes the connections. Processes in
/// another network namespace (a container) do not find it. Throws EnvironmentError.
Socket listen_under(const std::string& name);

/// Connects with `peer` ("rank 2"), who listens under that name. Throws EnvironmentError, at once
/// if nobody does.
Socket connect_under(const std::string& name, const std::string& peer, const Deadline& deadline);

/// Whether the other side is a process of this process's user.
bool has_same_user(const Socket& socket);

/// Sends a descriptor, which the other side gets as one of its own. Throws ConnectionClosed, or
/// EnvironmentError where the system does not let it through.
void send_descriptor(const Socket& socket, const Descriptor& descriptor);
/// Throws ConnectionClosed; PeerLost after the deadline, EnvironmentError if bytes came instead.
Descriptor receive_descriptor(const Socket& socket, const Deadline& deadline);

}  // namespace lockstep
