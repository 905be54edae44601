#pragma once
// What a launcher on this host gives the ranks, and a port for their store.

#include <netinet/in.h>
#include <sys/socket.h>

#include <stdexcept>
#include <vector>

#include "common/rendezvous/launch_contract.h"
#include "common/rendezvous/socket.h"

namespace lockstep::testing {

/// A port of 127.0.0.1 on which no process listens. As long as this process lives, the system gives
/// it to no process that asks for any port: it stays bound here, in a way that lets others listen
/// on it.
inline int free_port() {
  static auto& reserved = *new std::vector<Socket>;
  Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(socket.fd(), reinterpret_cast<const sockaddr*>(&any), sizeof any) != 0) {
    throw std::runtime_error("no free port");
  }
  reserved.push_back(std::move(socket));
  return reserved.back().local_address().port;
}

inline LaunchContract contract_of(int rank, int world_size, int port) {
  return {.rank = rank,
          .world_size = world_size,
          .local_rank = rank,
          .local_world_size = world_size,
          .master = {"127.0.0.1", port},
          .launcher = "torchrun",
          .run_id = ""};
}

}  // namespace lockstep::testing
