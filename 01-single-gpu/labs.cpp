// Mistakes that everybody makes once. Run each with the mistake, and without it.
//
//   build/01-single-gpu/labs batch-reused-early
//   build/01-single-gpu/labs batch-reused-early --fixed

#include <algorithm>
#include <chrono>
#include <thread>

#include "common/core/stream_backend.h"
#include "common/training/core_watch.h"
#include "common/training/lab.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

double milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

// --- Memory of a batch that is used again before its copy has ended ------------------------------

/// The host fills one piece of memory with batch after batch, and says of which the device got
/// what.
void batch_reused_early(bool fixed) {
  constexpr int64_t kBatches = 4, kBytes = 784;
  const auto device = open_device({DeviceId::Kind::cpu, 0}, {});
  const Stream stream = device->create_stream("compute");
  const ByteTensor arrived = ByteTensor::empty(stream, {kBatches, kBytes});
  const std::shared_ptr<void> memory = device->allocate_host(kBytes);
  std::optional<Event> copied;
  for (int64_t number = 0; number < kBatches; ++number) {
    if (fixed && copied) copied->synchronize();  // the copy from this memory has ended
    std::fill_n(static_cast<uint8_t*>(memory.get()), kBytes, uint8_t(number + 1));
    // The device is still at the step before when the host has this batch ready.
    stream.backend().host_task("step", [] { std::this_thread::sleep_for(milliseconds(20)); });
    stream.copy(arrived.rows(number, 1).data(), memory.get(), kBytes);
    copied = stream.record();
  }
  const std::vector<uint8_t> pixels = arrived.to_host();
  for (int64_t number = 0; number < kBatches; ++number) {
    say(fmt::format("batch {}: the device got the images of batch {}", number + 1,
                    int(pixels[size_t(number * kBytes)])));
  }
}

// --- A host that asks for the loss after every step ----------------------------------------------

/// What a host does for a batch besides training: reading, decoding, augmenting.
void prepare_batch() {
  const auto begin = Clock::now();
  while (milliseconds_since(begin) < 2) {
  }
}

/// Trains for some steps and says how long the device had nothing to do.
void loss_at_every_step(bool fixed) {
  constexpr int64_t kSteps = 30, kBatch = 32;
  SmallTraining training;
  const HostBatch batch = training.first_batch(kBatch);
  training.forward_and_backward(batch, {{0, 1, kBatch}}, 1.0 / kBatch);  // makes primitives
  std::vector<Real> losses(kSteps);
  double idle = 0;
  std::optional<TimedEvent> ended;
  CoreWatch cores({training.device.get()});
  cores.start();
  const auto begin = Clock::now();
  for (Real& loss : losses) {
    prepare_batch();
    const TimedEvent begun = training.stream.record_time();
    if (ended) idle += begun.seconds_since(*ended);
    training.enqueue_pass(batch, {{0, 1, kBatch}}, 1.0 / kBatch);
    training.update();
    training.stream.copy(&loss, training.loss.data(), sizeof(Real));
    ended = training.stream.record_time();
    if (!fixed) training.stream.synchronize();  // to print the loss at once
  }
  training.stream.synchronize();
  const double total = milliseconds_since(begin);
  say(fmt::format(
      "loss of the last step {:.6f}; {:.1f} ms per step, of which the device waits {:.1f} ms",
      losses.back(), total / kSteps, 1e3 * idle / (kSteps - 1)));  // between two steps
  cores.stop();
  const std::string busy =
      text_of_missing_cores({training.device->name()}, cores.shares_without_core());
  if (!busy.empty()) say(busy);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  using namespace lockstep;
  return run_labs(
      argc, argv,
      {{"batch-reused-early", batch_reused_early}, {"loss-at-every-step", loss_at_every_step}});
}
