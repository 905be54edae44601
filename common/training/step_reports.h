#pragma once
// Reports to the host about the steps that it enqueued, one step late.

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/core/tensor.h"
#include "common/kernels/kernels.h"

namespace lockstep {

/// One step as the device saw it.
struct StepReport {
  int64_t step;
  double loss;          // mean over the global batch, before the update
  int64_t failed_step;  // -1, or the step whose loss or gradient was not finite
  double seconds;       // from the step before it, or the epoch's start, by the device's clock
  Health health;        // after it, of the first device
};

/// Copies each step's loss and health to the host without stopping the device. While the host waits
/// for step s, step s + 1 is already queued after it.
class StepReports {
 public:
  /// Keeps the reports in host memory of `stream`'s device. The host's clock would not do for the
  /// times: on a busy machine the host may be woken late.
  explicit StepReports(Stream stream);

  /// The next step's time begins where the stream is now.
  void begin_epoch() { last_ = stream_.record_time(); }
  /// Enqueues the report of `step`, whose loss is in loss[0], of the same stream. A model on
  /// several devices has a health on each; their number never changes.
  void push(int64_t step, const Tensor& loss, const std::vector<HealthTensor>& healths);
  /// After begin_epoch(): the oldest report, if more than `keep` are outstanding; waits for it.
  std::optional<StepReport> take(size_t keep);

 private:
  struct Pending {
    int64_t step;
    const Real* loss;
    std::span<const Health> healths;
    TimedEvent loss_arrived;
    std::vector<Event> healths_arrived;
  };

  Stream stream_;
  std::shared_ptr<void> losses_, healths_;  // [kCells] Real, [kCells, number] Health
  size_t next_ = 0;
  std::deque<Pending> pending_;
  std::optional<TimedEvent> last_;  // after the step whose report was taken last
};

}  // namespace lockstep
