// What is known of the time of phases, and when it is forgotten.

#include "common/training/phase_timer.h"

#include "common/kernels/devices.h"
#include "tests/support/catch.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

TEST_CASE("A timer that starts anew forgets the phases that are still under way, too", "[phases]") {
  const auto device = open_device({DeviceId::Kind::cpu, 0}, {});
  const Stream stream = device->create_stream("compute");
  PhaseTimer timer(stream);
  const auto series = [&](const char* name) {
    timer.start();
    testing::enqueue(stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(10)); });
    timer.end(name);
    timer.stop();
  };
  series("before");
  timer.restart();
  CHECK(timer.totals().empty());
  series("behind");
  CHECK(timer.total("before") == 0);
  CHECK(timer.total("behind") >= 0.010);
}

}  // namespace
}  // namespace lockstep
