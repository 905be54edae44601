#pragma once
// What the host learns of the steps it enqueued, a step late.

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
};

/// Copies each step's loss and health to the host without stopping the device: while the host waits
/// for step s, step s + 1 is already queued behind it.
class StepReports {
 public:
  /// Keeps what arrives in host memory of `stream`'s device.
  explicit StepReports(Stream stream);

  /// Enqueues the report of `step`, whose loss stands in loss[0]. A model on several devices has a
  /// health on each; their number never changes.
  void push(int64_t step, const Tensor& loss, const std::vector<HealthTensor>& healths);
  /// The oldest report, if more than `keep` are outstanding; waits for it.
  std::optional<StepReport> take(size_t keep);

 private:
  struct Pending {
    int64_t step;
    const Real* loss;
    std::span<const Health> healths;
    std::vector<Event> arrived;
  };

  Stream stream_;
  std::shared_ptr<void> losses_, healths_;  // [kCells] Real, [kCells, number] Health
  size_t next_ = 0;
  std::deque<Pending> pending_;
};

}  // namespace lockstep
