#pragma once
// The host of simulated devices: the clock by which a program enqueues, and the memory that it
// believes to have on them.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

namespace lockstep {

class Device;

/// Belongs to one thread. Times are in nanoseconds since the program began.
class SimHost {
 public:
  // --- The clock ---------------------------------------------------------------------------------
  int64_t now() const { return now_; }
  /// Returns `ns`. Throws BadInput if it is so late that later times may not fit into 63 bits.
  static int64_t counted(int64_t ns);
  /// Moves the clock on by `ns`: the host works for so long.
  void work(int64_t ns) { now_ = counted(now_ + ns); }
  /// Moves the clock to `ns`, if that is later: the host has waited for something that comes then.
  void wait_until(int64_t ns) { now_ = now_ > ns ? now_ : ns; }

  // --- Memory ------------------------------------------------------------------------------------
  //
  // A large block is only an address, at which no machine has memory: a program that reads there
  // ends at once. A small block is memory, zeros at first, for states, counts and other numbers
  // that the host writes and reads again.

  void* allocate(size_t bytes, const Device& device);
  void release(void* memory);
  /// Copies memory, and known values. If the source has no memory, the destination becomes zeros.
  void copy(void* to, const void* from, size_t bytes);
  /// The device whose memory is at this address; null: the memory is the host's own.
  const Device* device_at(const void* address) const;
  static bool is_memory(const void* address) { return place_of(address) < kNowhere; }

  // --- Known values ------------------------------------------------------------------------------
  //
  // No kernel computes. But some results follow from shapes, and steer the host: how many rows a
  // batch normalisation saw. These few are known, by address.

  void know(const void* address, double value) { known_[place_of(address)] = value; }
  /// The value at this address; null if it is not known.
  const double* known(const void* address) const;
  /// Copies the known values within `bytes` from `from` on to the same places from `to` on, times
  /// `factor`. Forgets the values that were known there before.
  void copy_known(void* to, const void* from, size_t bytes, double factor = 1);

 private:
  struct Block {
    uint64_t bytes;
    const Device* device;
  };
  /// From here on no program has memory: the upper half of all addresses is the system's.
  static constexpr uint64_t kNowhere = uint64_t{1} << 63;
  static uint64_t place_of(const void* address) { return reinterpret_cast<uint64_t>(address); }
  void forget(const void* first, size_t bytes);
  void tell_known(void* to, const void* from, size_t bytes) const;

  int64_t now_ = 0;
  uint64_t next_place_ = kNowhere;
  std::map<uint64_t, Block> blocks_;  // by address
  std::map<uint64_t, double> known_;
};

}  // namespace lockstep
