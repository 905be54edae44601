#pragma once
// The resources of the host that CPU devices use: cores on which threads compute, memory for their
// numbers, and the time.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

/// Cores by their numbers, in order.
using Cores = std::vector<int>;

/// The cores that the calling thread may use; empty if the machine has more than can be named.
Cores usable_cores();

/// Part number `share` of `shares` equal parts of the cores that the calling thread may use. Cores
/// left over belong to no part. Empty if a part has fewer cores than `threads`.
Cores share_of_cores(int share, int shares, int threads);

/// The calling thread, and the threads that it starts from now on, keep to these cores. If there
/// are none, everything stays as it is.
void keep_to(const Cores& cores);

/// Tells the core that this loop only waits.
inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// The steady clock, ns.
inline int64_t steady_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Memory that begins at a cache line. Large blocks ask the system for large pages: a kernel that
/// reads many places at once then needs fewer translations of addresses.
void* allocate_aligned(size_t bytes);
void release_aligned(void* memory);

/// The text for an error after the system gave no memory: "; ulimit -v is 200000 KiB here: raise
/// it". Without such a limit it names the other place to look at. Allocates no memory itself.
std::array<char, 80> memory_limit_note();

}  // namespace lockstep
