#include "common/core/cores.h"

#include <sched.h>

#include <cstddef>

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

}  // namespace lockstep
