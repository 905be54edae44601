#pragma once
// What lies where in the memory that the ranks of one host share.
//
//   RankState[W]      what each rank tells the others
//   slot[W][2]        what each rank shows to all, in even and in odd rounds
//   Lane[W][W]        what rank a sends to rank b
//
// All but the lanes grows with the number of ranks, and is there from the beginning. Of the lanes,
// which grow with its square, the system gives only those that are used (ShmLanes).

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace lockstep {

constexpr size_t kCacheLine = 64;  // two ranks never write to one: it would go to and fro

struct RankState {
  alignas(kCacheLine) std::atomic<uint64_t> rounds{0};  // that this rank has come to
  std::array<std::atomic<uint64_t>, 2> calls{};         // for which, in even and in odd rounds
  std::atomic<int> core{-1};                            // on which it ran then
  alignas(kCacheLine) std::atomic<int> asleep{0};       // 1: it waits for a byte in its socket
};

/// Bytes from one rank to another, first in, first out. Only the sender writes `sent`, only the
/// receiver `taken`: counts of all bytes so far. Memory that nobody has written holds a lane that
/// nobody has used: zeros.
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
  /// A slot has room for a piece for each rank, and for one that the rank has reduced. They are so
  /// small that those of two rounds stay in the cache.
  static constexpr size_t kPiecesBytes = 256 << 10;

  ShmLayout(std::byte* base, int world_size) : base_(base), ranks_(size_t(world_size)) {}

  static size_t bytes(int world_size) {
    const ShmLayout at_zero(nullptr, world_size);
    return at_zero.lanes_at() + at_zero.ranks_ * at_zero.ranks_ * sizeof(Lane);
  }
  /// Of these, the bytes that all ranks use from the beginning: the first ones.
  static size_t used_bytes(int world_size) { return ShmLayout(nullptr, world_size).lanes_at(); }
  /// By one rank, before the others see the memory.
  void begin() const {
    for (size_t r = 0; r < ranks_; ++r) new (base_ + r * sizeof(RankState)) RankState;
  }

  RankState& state(int rank) const {
    return reinterpret_cast<RankState*>(base_)[static_cast<size_t>(rank)];
  }
  Lane& lane(int from, int to) const { return *reinterpret_cast<Lane*>(base_ + lane_at(from, to)); }
  /// Where that lane begins in the memory.
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

}  // namespace lockstep
