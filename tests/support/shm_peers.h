#pragma once
// The ranks' sides of shared memory, without a process for each rank.

#include <sys/socket.h>

#include <memory>
#include <utility>
#include <vector>

#include "common/comm/shm_segment.h"

namespace lockstep::testing {

/// All ranks' sides of the shared memory. It is mapped once, so that ThreadSanitizer sees that the
/// ranks use the same memory.
inline std::vector<std::unique_ptr<ShmPeers>> shm_peers(int world_size, double timeout_seconds) {
  std::vector<std::vector<Socket>> sockets;
  for (int rank = 0; rank < world_size; ++rank) sockets.emplace_back(size_t(world_size));
  for (int a = 0; a < world_size; ++a) {
    for (int b = 0; b < a; ++b) {
      int ends[2];
      const int kind = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
      require(::socketpair(AF_UNIX, kind, 0, ends) == 0, "no pair of sockets");
      sockets[size_t(a)][size_t(b)] = Socket(ends[0]);
      sockets[size_t(b)][size_t(a)] = Socket(ends[1]);
      sockets[size_t(a)][size_t(b)].name_peer(fmt::format("rank {}", b));
      sockets[size_t(b)][size_t(a)].name_peer(fmt::format("rank {}", a));
    }
  }
  const auto memory = std::make_shared<SharedMemory>(
      SharedMemory::create(ShmLayout::bytes(world_size), ShmLayout::used_bytes(world_size)));
  ShmLayout(memory->data(), world_size).begin();
  std::vector<std::unique_ptr<ShmPeers>> peers;
  for (int rank = 0; rank < world_size; ++rank) {
    peers.push_back(std::make_unique<ShmPeers>(memory, rank, std::move(sockets[size_t(rank)]),
                                               timeout_seconds));
  }
  return peers;
}

}  // namespace lockstep::testing
