#include "common/app/step_reports.h"

#include "common/core/device.h"
#include "common/core/error.h"

namespace lockstep {
namespace {
constexpr size_t kCells = 4;
}

StepReports::StepReports(Stream stream)
    : stream_(stream), cells_(stream.device().allocate_host(kCells * sizeof(Cell))) {}

void StepReports::push(int64_t step, const Tensor& loss, const HealthTensor& health) {
  require(pending_.size() < kCells, "more than {} step reports are outstanding", kCells);
  Cell* cell = static_cast<Cell*>(cells_.get()) + next_++ % kCells;
  stream_.copy(&cell->loss, loss.data(), sizeof(Real));
  stream_.copy(&cell->health, health.data(), sizeof(Health));
  pending_.push_back({step, cell, stream_.record()});
}

std::optional<StepReport> StepReports::take(size_t keep) {
  if (pending_.size() <= keep) return std::nullopt;
  const Pending oldest = pending_.front();
  oldest.arrived.synchronize();
  pending_.pop_front();
  return StepReport{oldest.step, double(oldest.cell->loss), oldest.cell->health.failed_step};
}

}  // namespace lockstep
