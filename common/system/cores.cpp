#include "common/system/cores.h"

#include <sched.h>

namespace lockstep {

void bind_to_share_of_cores(int share, int shares, int threads) {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;  // more cores than it can name
  const int size = CPU_COUNT(&allowed) / shares;
  if (size < threads) return;
  cpu_set_t own;
  CPU_ZERO(&own);
  for (int core = 0, number = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed)) continue;
    if (number / size == share) CPU_SET(core, &own);
    ++number;
  }
  ::sched_setaffinity(0, sizeof own, &own);
}

}  // namespace lockstep
