#include "common/core/host.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cstdint>
#include <cstdio>
#include <new>

namespace lockstep {

Cores usable_cores() {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return {};
  Cores cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  return cores;
}

Cores share_of_cores(int share, int shares, int threads) {
  const Cores all = usable_cores();
  const int size = static_cast<int>(all.size()) / shares;
  if (size < threads) return {};
  const auto first = all.begin() + std::ptrdiff_t{share} * size;
  return {first, first + size};
}

void keep_to(const Cores& cores) {
  if (cores.empty()) return;
  cpu_set_t own;
  CPU_ZERO(&own);
  for (const int core : cores) CPU_SET(core, &own);
  ::sched_setaffinity(0, sizeof own, &own);
}

namespace {

constexpr std::align_val_t kAlignment{64};
constexpr size_t kLargePage = size_t{2} << 20;

/// A request, not more: where it is refused, pages stay small.
void ask_for_large_pages(void* memory, size_t bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (address + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t end = (address + bytes) / kLargePage * kLargePage;
  if (begin < end)
    ::madvise(static_cast<char*>(memory) + (begin - address), end - begin, MADV_HUGEPAGE);
}

}  // namespace

void* allocate_aligned(size_t bytes) {
  void* memory = ::operator new(bytes, kAlignment);
  if (bytes >= 2 * kLargePage) ask_for_large_pages(memory, bytes);
  return memory;
}

std::array<char, 80> memory_limit_note() {
  rlimit limit{};
  std::array<char, 80> note{"; see the container's limit"};
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    std::snprintf(note.data(), note.size(), "; ulimit -v is %llu KiB here: raise it",
                  static_cast<unsigned long long>(limit.rlim_cur / 1024));
  }
  return note;
}

void release_aligned(void* memory) { ::operator delete(memory, kAlignment); }

}  // namespace lockstep
