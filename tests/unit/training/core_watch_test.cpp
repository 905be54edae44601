// Whether CPU devices got their cores.

#include "common/training/core_watch.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <stdexcept>

#include "common/core/host.h"
#include "common/kernels/devices.h"
#include "tests/support/catch.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

/// Another process that computes on this core: what this one's threads do is not counted.
class BusyProcess {
 public:
  explicit BusyProcess(int core) : process_(::fork()) {
    if (process_ < 0) throw std::runtime_error("no further process");
    if (process_ > 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // it does not outlive the test
    keep_to({core});
    while (true) pause_core();
  }
  ~BusyProcess() {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  BusyProcess(const BusyProcess&) = delete;
  BusyProcess& operator=(const BusyProcess&) = delete;

 private:
  pid_t process_;
};

/// The stream computes until something else has had its core for 0.3 s.
void share_core(Stream stream) {
  testing::enqueue(stream, [] {
    const auto queued = [] { return thread_times(::gettid())->queued; };
    const auto begin = testing::Clock::now();
    const double before = queued();
    while (queued() < before + 0.3 && testing::seconds_since(begin) < testing::kLong) continue;
  });
  stream.synchronize();
}

}  // namespace

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
  const int core = usable_cores().at(0);
  const BusyProcess busy(core);
  const Devices devices = open_devices({{DeviceId::Kind::cpu, 0}}, {.cores = {core}});
  const Stream stream = devices[0]->create_stream("compute");
  CoreWatch watch(pointers_to(devices));
  share_core(stream);
  watch.start();
  watch.stop();
  share_core(stream);
  CHECK(watch.shares_without_core() == std::vector<double>{0});
  watch.start();
  share_core(stream);
  watch.stop();
  CHECK(watch.shares_without_core().at(0) > kNoticedWithoutCore);
}

TEST_CASE("Devices that lacked a core for a tenth of their time are named", "[watch]") {
  CHECK(text_of_missing_cores({"cpu:0", "cpu:1"}, {0.09, 0}) == "");
  CHECK(text_of_missing_cores({"cpu:0", "cpu:1", "cpu:2"}, {0.314, 0.02, 0.1}) ==
        "Ready to compute, but without a core: cpu:0 for 31 %, cpu:2 for 10 % of its time. "
        "Something else runs on this machine, or there are more devices than cores; these timings "
        "are not those of a quiet machine. A device that waits for another one without a core "
        "counts this time as waiting: as a pipeline's bubble, or as communication.");
}

}  // namespace lockstep
