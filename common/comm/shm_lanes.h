#pragma once
// Sends and receives between ranks that share memory.

#include <cstdint>
#include <vector>

#include "common/comm/communicator.h"
#include "common/comm/shm_peers.h"

namespace lockstep {

/// Carries messages through the lanes of a shared memory, each from one rank to another.
class ShmLanes {
 public:
  explicit ShmLanes(ShmPeers& peers)
      : peers_(peers), used_(2, std::vector<bool>(size_t(peers.world_size()))) {}

  /// Sends and receives all at the same time, each as fast as its other side allows. The messages
  /// between two ranks keep their order. Throws what ShmPeers does; EnvironmentError if there is no
  /// memory for a lane that is used for the first time.
  void transfer(const std::vector<Call>& calls);
  /// Bytes that these have written.
  int64_t bytes_sent() const { return bytes_sent_; }

 private:
  /// What is left of a send or a receive.
  struct Message {
    bool sends;
    int peer;
    std::byte* bytes;
    size_t left;
  };
  void provide_lane(const Call& call);
  bool can_move(const Message& message) const;
  void move_some(Message& message);

  ShmPeers& peers_;
  std::vector<std::vector<bool>> used_;  // lanes that this rank sends by [1], receives by [0]
  int64_t bytes_sent_ = 0;
};

}  // namespace lockstep
