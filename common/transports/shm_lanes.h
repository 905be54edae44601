#pragma once
// Sends and receives between ranks that share memory.

#include <vector>

#include "common/comm/communicator.h"
#include "common/transports/shm_peers.h"

namespace lockstep {

/// Carries messages through the lanes of a shared memory, each from one rank to another.
class ShmLanes {
 public:
  explicit ShmLanes(ShmPeers& peers) : peers_(peers) {}

  /// Sends and receives all at the same time, each as fast as its other side allows. The messages
  /// between two ranks keep their order. Throws what ShmPeers does.
  void transfer(const std::vector<Call>& calls);

 private:
  /// What is left of a send or a receive.
  struct Message {
    bool sends;
    int peer;
    std::byte* bytes;
    size_t left;
  };
  bool can_move(const Message& message) const;
  void move_some(Message& message) const;

  ShmPeers& peers_;
};

}  // namespace lockstep
