// Ranks that share a host's cores.

#include <sched.h>

#include <set>
#include <thread>

#include "common/system/cores.h"
#include "tests/support/catch.h"

namespace lockstep {
namespace {

std::set<int> cores_of_this_thread() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  ::sched_getaffinity(0, sizeof allowed, &allowed);
  std::set<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.insert(core);
  }
  return cores;
}

/// The cores of a thread that takes part `share` of `shares`.
std::set<int> bound(int share, int shares, int threads) {
  std::set<int> cores;
  std::thread([&] {
    bind_to_share_of_cores(share, shares, threads);
    cores = cores_of_this_thread();
  }).join();
  return cores;
}

}  // namespace

TEST_CASE("Ranks divide the cores of their host, and none of them gets another's", "[cores]") {
  const std::set<int> all = cores_of_this_thread();
  const int count = static_cast<int>(all.size());
  for (int shares = 1; shares <= count; ++shares) {
    std::set<int> taken;
    for (int share = 0; share < shares; ++share) {
      const std::set<int> own = bound(share, shares, 1);
      CHECK(static_cast<int>(own.size()) == count / shares);
      for (const int core : own) {
        CHECK(all.contains(core));
        CHECK(taken.insert(core).second);
      }
    }
  }
}

TEST_CASE("A share too small for a rank's threads is left alone", "[cores]") {
  const std::set<int> all = cores_of_this_thread();
  const int count = static_cast<int>(all.size());
  CHECK(bound(0, count + 1, 1) == all);
  CHECK(bound(0, 1, count + 1) == all);
  CHECK(bound(0, 2, count) == (count > 1 ? all : bound(0, 2, 1)));
}

}  // namespace lockstep
