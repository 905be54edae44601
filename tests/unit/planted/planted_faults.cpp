// A program with a fault on purpose, and the same program without it: what the sanitizers must
// report, and what they must accept. The two differ only in the missing line.
//
//   planted-faults missing-wait|with-wait fast|late
//   planted-faults use-after-free|use-after-free-fixed
//
// Exit status 0: ran to the end, 1: the correct program computed a wrong result, 2: wrong usage. A
// sanitizer that reports something sets its own.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/core/cpu_stream.h"
#include "common/core/error.h"
#include "common/core/stream_backend.h"
#include "common/kernels/devices.h"
#include "common/kernels/kernels.h"
#include "common/system/flight_recorder.h"
#include "common/system/shared_memory.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kElements = 1000;

/// One stream fills a tensor with ones, another adds it to zeros. Between any two calls the host
/// sleeps for `pause`: by then the worker has long done its tasks, and a queue that told the host
/// so would hide the fault.
bool fill_here_read_there(bool with_wait, milliseconds pause) {
  const std::unique_ptr<Device> device = open_device({DeviceId::Kind::cpu, 0}, {});
  const Stream producer = device->create_stream("producer");
  const Stream consumer = device->create_stream("consumer");
  const Tensor x = Tensor::empty(producer, {kElements});
  const Tensor sum = Tensor::empty(consumer, {kElements});
  const auto dawdle = [&] { std::this_thread::sleep_for(pause); };

  // Both streams also make calls that are recorded and keep something, as HostCommunicator's do:
  // that orders nothing.
  const SharedMemory memory = SharedMemory::create(flight_stride());
  ::setenv(kFlightMemory, flight_memory(memory.descriptor().get()).c_str(), 1);
  const auto recorder = std::make_shared<FlightRecorder>(0, 1, 0, "");
  const Kept<std::string> kept("a transport");
  const auto record = [&](Stream stream) {
    stream.backend().host_task("call", [kept, call = FlightCall(recorder.get(), {})]() mutable {
      call.start(), call.complete();
    });
  };

  device->kernels().fill(consumer, 0, sum);
  dawdle();
  device->kernels().fill(producer, 1, x);
  record(producer);
  dawdle();
  const Event filled = producer.record();
  dawdle();
  if (with_wait) consumer.wait(filled);  // THE LINE
  record(consumer);
  dawdle();
  device->kernels().add(consumer, x, sum);
  dawdle();
  producer.wait(consumer.record());  // x is handed back to its home stream

  const std::vector<Real> values = sum.to_host();
  producer.synchronize();
  return !with_wait || values == std::vector<Real>(kElements, 1);
}

/// A tensor is read on a stream that is not its home while its last handle goes.
bool free_while_another_stream_reads(bool hand_back) {
  const std::unique_ptr<Device> device = open_device({DeviceId::Kind::cpu, 0}, {});
  const Stream home = device->create_stream("home");
  const Stream other = device->create_stream("other");
  const Tensor sum = Tensor::empty(other, {kElements});
  device->kernels().fill(other, 0, sum);

  Tensor x = Tensor::empty(home, {kElements});
  device->kernels().fill(home, 1, x);
  other.wait(home.record());
  // The other stream is busy with something else for a while before it comes to x.
  static_cast<CpuStream&>(other.backend()).enqueue("busy", [] {
    std::this_thread::sleep_for(milliseconds(50));
  });
  device->kernels().add(other, x, sum);
  if (hand_back) home.wait(other.record());  // THE LINE
  x = Tensor();

  return sum.to_host() == std::vector<Real>(kElements, 1) || !hand_back;
}

int run(const std::vector<std::string>& arguments) {
  const std::string mode = arguments.empty() ? "" : arguments[0];
  const std::string pace = arguments.size() < 2 ? "" : arguments[1];
  if ((mode == "missing-wait" || mode == "with-wait") && (pace == "fast" || pace == "late")) {
    const milliseconds pause(pace == "late" ? 20 : 0);
    return fill_here_read_there(mode == "with-wait", pause) ? 0 : 1;
  }
  if (mode == "use-after-free" || mode == "use-after-free-fixed") {
    return free_while_another_stream_reads(mode == "use-after-free-fixed") ? 0 : 1;
  }
  fmt::print(stderr,
             "usage: planted-faults missing-wait|with-wait fast|late\n"
             "       planted-faults use-after-free|use-after-free-fixed\n");
  return 2;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::run({argv + 1, argv + argc}); }
