// Whether CPU devices got their cores.

#include "common/training/core_watch.h"

#include <unistd.h>

#include "common/kernels/devices.h"
#include "tests/support/catch.h"

namespace lockstep {

TEST_CASE("What a thread waited for its own process is nobody else's fault", "[watch]") {
  CHECK(share_without_core({.computed = 0, .queued = 0}, 0) == 0);
  CHECK(share_without_core({.computed = 0.05, .queued = 0.1}, 0) == 0);  // too short to say
  CHECK(share_without_core({.computed = 3, .queued = 1}, 0) == Approx(0.25));
  CHECK(share_without_core({.computed = 3, .queued = 1}, 0.6) == Approx(0.1));
  CHECK(share_without_core({.computed = 3, .queued = 1}, 2) == 0);
}

TEST_CASE("The times of a thread are there, and those of a thread that is not are not", "[watch]") {
  const auto before = thread_times(::gettid());
  REQUIRE(before);
  const double process_before = process_seconds();
  while (process_seconds() < process_before + 0.02) continue;
  CHECK(thread_times(::gettid())->computed > before->computed);
  CHECK_FALSE(thread_times(0));
  CHECK_FALSE(thread_times(1));  // not of this process
}

TEST_CASE("Only what is on while the watch is on counts", "[watch]") {
  const Devices devices = open_devices({{DeviceId::Kind::cpu, 0}}, {});
  const Stream stream = devices[0]->create_stream("compute");
  stream.synchronize();
  CoreWatch watch(pointers_to(devices));
  CHECK(watch.shares_without_core() == std::vector<double>{0});
  watch.start();
  watch.stop();
  const double share = watch.shares_without_core().at(0);
  CHECK(share >= 0);
  CHECK(share <= 1);
}

TEST_CASE("Devices that lacked a core for a tenth of their time are named", "[watch]") {
  CHECK(text_of_missing_cores({"cpu:0", "cpu:1"}, {0.09, 0}) == "");
  CHECK(text_of_missing_cores({"cpu:0", "cpu:1", "cpu:2"}, {0.314, 0.02, 0.1}) ==
        "Ready to compute, but without a core: cpu:0 for 31 %, cpu:2 for 10 % of its time. "
        "Something else runs on this machine, or there are more devices than cores; these timings "
        "are not those of a quiet machine. Who waits for a device without a core counts that as "
        "waiting: as a pipeline's bubble, or as communication.");
}

}  // namespace lockstep
