#pragma once
// How ranks that share memory wait for each other.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/comm/shm_layout.h"
#include "common/rendezvous/socket.h"
#include "common/system/shared_memory.h"

namespace lockstep {

/// One rank's view of the shared memory, and a Unix socket to every other rank. Nothing but bytes
/// that wake a sleeping rank goes through the sockets; a socket also ends with its process, and so
/// tells at once that a rank is gone.
///
/// Whoever waits looks for a while, if the other rank has a core to go on; then it sleeps. Throws
/// PeerLost naming a rank that closed its sockets ("rank 2 closed the connection") or did not do
/// what was waited for in time ("rank 2 did not answer within 5 s"). One thread at a time.
class ShmPeers {
 public:
  /// `sockets` by rank; this rank's own is closed.
  ShmPeers(std::shared_ptr<SharedMemory> memory, int rank, std::vector<Socket> sockets,
           double timeout_seconds);

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(sockets_.size()); }
  const ShmLayout& memory() const { return memory_; }
  const Descriptor& descriptor() const { return owner_->descriptor(); }
  /// Before this rank uses a lane for the first time. Throws EnvironmentError without memory for
  /// it.
  void set_lane_aside(int from, int to) const {
    owner_->set_aside(memory_.lane_at(from, to), sizeof(Lane));
  }

  /// Tells `peer`, should it sleep, that there is something new in the memory. Call it after the
  /// store (release) that the peer waits to see.
  void wake(int peer) const;

  /// Whom a rank that has not come concerns: who waits for that rank itself, or all ranks, as none
  /// of them can go on.
  enum class Concerns { awaiting, all };
  /// Returns when ready() is true. `awaited(r)` says whether that still depends on rank r; both
  /// read the memory (acquire).
  using Ready = std::function<bool()>;
  using Awaited = std::function<bool(int rank)>;
  void wait(const Ready& ready, const Awaited& awaited, Concerns concerns);

 private:
  bool look_for_a_while(const Ready& ready, const Awaited& awaited) const;
  bool sleep(const Deadline& deadline);
  void require_all_there(const Awaited& awaited, Concerns concerns) const;
  std::string all_awaited(const Awaited& awaited) const;

  std::shared_ptr<SharedMemory> owner_;
  ShmLayout memory_;
  int rank_;
  std::vector<Socket> sockets_;
  std::vector<std::string> ends_;  // by rank: why its socket is of no use; empty if it is
  double timeout_;
};

}  // namespace lockstep
