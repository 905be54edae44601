// Devices, and ranks, that share a machine's cores.

#include "common/core/host.h"

#include <algorithm>
#include <set>
#include <thread>

#include "common/core/stream_backend.h"
#include "common/kernels/devices.h"
#include "tests/support/catch.h"

namespace lockstep {
namespace {

/// The cores of a thread that keeps to part `share` of `shares`.
Cores bound(int share, int shares, int threads) {
  Cores cores;
  std::thread([&] {
    keep_to(share_of_cores(share, shares, threads));
    cores = usable_cores();
  }).join();
  return cores;
}

/// The cores that each device's stream may use.
std::vector<Cores> cores_of_streams(int devices, const DeviceOptions& options) {
  std::vector<DeviceId> ids;
  for (int index = 0; index < devices; ++index) ids.push_back({DeviceId::Kind::cpu, index});
  std::vector<Cores> found(ids.size());
  const Devices opened = open_devices(ids, options);
  for (size_t d = 0; d < opened.size(); ++d) {
    const Stream stream = opened[d]->create_stream("compute");
    stream.backend().host_task("look", [&, d] { found[d] = usable_cores(); });
    stream.synchronize();
  }
  return found;
}

}  // namespace

TEST_CASE("The parts of the cores are equal, and no core is in two", "[cores]") {
  const Cores all = usable_cores();
  const int count = static_cast<int>(all.size());
  for (int shares = 1; shares <= count; ++shares) {
    std::set<int> taken;
    for (int share = 0; share < shares; ++share) {
      const Cores own = bound(share, shares, 1);
      CHECK(static_cast<int>(own.size()) == count / shares);
      for (const int core : own) {
        CHECK(std::ranges::count(all, core) == 1);
        CHECK(taken.insert(core).second);
      }
    }
  }
}

TEST_CASE("Where a part is too small for the threads nothing is bound", "[cores]") {
  const Cores all = usable_cores();
  const int count = static_cast<int>(all.size());
  CHECK(bound(0, count + 1, 1) == all);
  CHECK(bound(0, 1, count + 1) == all);
  CHECK(bound(0, 2, count) == (count > 1 ? all : bound(0, 2, 1)));
}

TEST_CASE("CPU devices that are opened together keep to a part of the cores each", "[cores]") {
  const Cores all = usable_cores();
  const int count = static_cast<int>(all.size());
  const std::vector<Cores> bound_devices = cores_of_streams(count, {.bind = true});
  for (int d = 0; d < count; ++d) CHECK(bound_devices[d] == Cores{all[d]});
  CHECK(usable_cores() == all);  // the host's thread, and what it starts, stay free

  const std::vector<Cores> unbound(static_cast<size_t>(count), all);
  CHECK(cores_of_streams(count, {.bind = false}) == unbound);
  CHECK(cores_of_streams(count, {.threads = 2, .bind = true}) == unbound);
  CHECK(cores_of_streams(1, {.bind = true}) == std::vector<Cores>{all});
}

}  // namespace lockstep
