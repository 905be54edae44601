#pragma once
// The memory that the ranks of one host share, and how they meet in it.
//
//   RankState[W]      what each rank tells the others
//   slot[W][2]        what each rank shows to all, in even and in odd rounds
//   Lane[W][W]        what rank a sends to rank b
//
// All parts but the lanes grow with the number of ranks, and are there from the beginning. The
// lanes grow with its square: the system gives only lanes that are used (set_lane_aside()).

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/rendezvous/socket.h"
#include "common/system/shared_memory.h"

namespace lockstep {

class HostTransport;
class Store;

constexpr size_t kCacheLine = 64;  // two ranks never write to the same one: it would go to and fro

struct RankState {
  alignas(kCacheLine) std::atomic<uint64_t> rounds{0};  // that this rank has come to
  std::array<std::atomic<uint64_t>, 2> calls{};         // for which call, in even and in odd rounds
  std::atomic<int> core{-1};                            // on which it ran then
  alignas(kCacheLine) std::atomic<int> asleep{0};       // 1: it waits for a byte in its socket
};

/// Bytes from one rank to another, first in, first out. Only the sender writes `sent`, and only the
/// receiver writes `taken`: both count all bytes so far. Memory to which nobody has written is all
/// zeros, and so is a lane that nobody has used.
struct Lane {
  static constexpr size_t kBytes = 64 << 10;
  alignas(kCacheLine) std::atomic<uint64_t> sent{0};
  alignas(kCacheLine) std::atomic<uint64_t> taken{0};
  alignas(kCacheLine) std::array<std::byte, kBytes> bytes;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "locks are of one process only");

/// The places of `world_size` ranks in memory at `base`, which is aligned as pages are.
class ShmLayout {
 public:
  /// A slot has room for a piece for each rank, and for one that the rank has reduced. The pieces
  /// are so small that those of two rounds stay in the cache.
  static constexpr size_t kPiecesBytes = 256 << 10;

  ShmLayout(std::byte* base, int world_size) : base_(base), ranks_(size_t(world_size)) {}

  static size_t bytes(int world_size) {
    const ShmLayout at_zero(nullptr, world_size);
    return at_zero.lanes_at() + at_zero.ranks_ * at_zero.ranks_ * sizeof(Lane);
  }
  /// How many of the first bytes all ranks use from the beginning.
  static size_t used_bytes(int world_size) { return ShmLayout(nullptr, world_size).lanes_at(); }
  /// Makes all ranks' states. One rank calls it, before the others see the memory.
  void begin() const {
    for (size_t r = 0; r < ranks_; ++r) new (base_ + r * sizeof(RankState)) RankState;
  }

  RankState& state(int rank) const {
    return reinterpret_cast<RankState*>(base_)[static_cast<size_t>(rank)];
  }
  Lane& lane(int from, int to) const { return *reinterpret_cast<Lane*>(base_ + lane_at(from, to)); }
  /// The place in the memory where that lane begins, in bytes.
  size_t lane_at(int from, int to) const {
    return lanes_at() + (size_t(from) * ranks_ + size_t(to)) * sizeof(Lane);
  }
  std::byte* slot(int rank, uint64_t round) const {
    return base_ + slots_at() + (2 * size_t(rank) + round % 2) * slot_bytes();
  }
  size_t piece_bytes() const { return kPiecesBytes / ranks_ / kCacheLine * kCacheLine; }
  size_t slot_bytes() const { return (ranks_ + 1) * piece_bytes(); }

 private:
  size_t slots_at() const { return ranks_ * sizeof(RankState); }
  size_t lanes_at() const { return slots_at() + 2 * ranks_ * slot_bytes(); }

  std::byte* base_;
  size_t ranks_;
};

/// One rank's view of the shared memory, and a Unix socket to every other rank. The sockets carry
/// only bytes that wake a sleeping rank. A socket also ends with its process, and so tells at once
/// that a rank is gone.
///
/// A rank that waits looks for a while if an awaited rank has another core; then it sleeps. Throws
/// PeerLost naming a rank that closed its sockets ("rank 2 closed the connection") or was late
/// ("rank 2 did not answer within 5 s"). One thread at a time.
class ShmPeers {
 public:
  /// `sockets` by rank; this rank's own is closed.
  ShmPeers(std::shared_ptr<SharedMemory> memory, int rank, std::vector<Socket> sockets,
           double timeout_seconds);

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(sockets_.size()); }
  /// Another rank's name, as its socket was named: "rank 2".
  const std::string& name_of(int rank) const { return sockets_[size_t(rank)].peer(); }
  void name_peers(const std::function<std::string(int rank)>& name_of) {
    for (int rank = 0; rank < world_size(); ++rank) sockets_[size_t(rank)].name_peer(name_of(rank));
  }
  /// As HostTransport::break_off().
  void break_off() const {
    for (const Socket& socket : sockets_) socket.shut_down();
  }
  const ShmLayout& memory() const { return memory_; }
  const Descriptor& descriptor() const { return owner_->descriptor(); }
  /// Gets the memory of a lane. Call it before this rank first uses the lane. Throws
  /// EnvironmentError if there is no memory.
  void set_lane_aside(int from, int to) const {
    owner_->set_aside(memory_.lane_at(from, to), sizeof(Lane));
  }

  /// Wakes `peer`, if it sleeps: there is something new in the memory. Call it after the store
  /// (release) that the peer waits to see.
  void wake(int peer) const;

  /// The ranks that cannot go on if a rank is gone: only those that wait for that rank itself, or
  /// all ranks.
  enum class Concerns { awaiting, all };
  /// wait() returns when ready() is true. `awaited(r)` says whether ready() still depends on rank
  /// r. Both read the memory (acquire).
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

/// Connects this rank with all others of the store. Throws as connect_shm() does.
std::unique_ptr<ShmPeers> meet_in_shm(Store& store, double timeout_seconds);

/// The transport of a rank that has met the others.
std::shared_ptr<HostTransport> make_shm_transport(std::unique_ptr<ShmPeers> peers);

}  // namespace lockstep
