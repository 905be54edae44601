#include "common/training/step_reports.h"

#include <utility>

#include "common/core/device.h"
#include "common/core/error.h"

namespace lockstep {
namespace {
constexpr size_t kCells = 4;
}

StepReports::StepReports(Stream stream)
    : stream_(stream), losses_(stream.device().allocate_host(kCells * sizeof(Real))) {}

void StepReports::push(int64_t step, const Tensor& loss, const std::vector<HealthTensor>& healths) {
  require(pending_.size() < kCells, "more than {} step reports are outstanding", kCells);
  const size_t number = healths.size(), cell = next_++ % kCells;
  if (!healths_) {
    healths_ = stream_.device().allocate_host(kCells * number * sizeof(Health));
  }
  Real* const loss_cell = static_cast<Real*>(losses_.get()) + cell;
  Health* const health_cells = static_cast<Health*>(healths_.get()) + cell * number;
  loss.home().copy(loss_cell, loss.data(), sizeof(Real));
  pending_.push_back({step, loss_cell, {health_cells, number}, loss.home().record_time(), {}});
  for (size_t i = 0; i < number; ++i) {
    const Stream home = healths[i].home();
    home.copy(health_cells + i, healths[i].data(), sizeof(Health));
    pending_.back().healths_arrived.push_back(home.record());
  }
}

std::optional<StepReport> StepReports::take(size_t keep) {
  if (pending_.size() <= keep) return std::nullopt;
  const Pending oldest = pending_.front();
  oldest.loss_arrived.synchronize();
  for (const Event& event : oldest.healths_arrived) event.synchronize();
  pending_.pop_front();
  const double seconds =
      oldest.loss_arrived.seconds_since(*std::exchange(last_, oldest.loss_arrived));
  StepReport report{oldest.step, double(*oldest.loss), -1, seconds, oldest.healths.front()};
  for (const Health& health : oldest.healths) {  // the earliest step that failed anywhere
    const int64_t failed = health.failed_step;
    if (failed >= 0 && (report.failed_step < 0 || failed < report.failed_step)) {
      report.failed_step = failed;
    }
  }
  return report;
}

}  // namespace lockstep
