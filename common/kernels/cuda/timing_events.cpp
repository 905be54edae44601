#include "common/kernels/cuda/timing_events.h"

#include <utility>

namespace lockstep::cuda {

TimingEvents::Owned TimingEvents::take() {
  const std::lock_guard lock(mutex_);
  if (!unused_.empty()) {
    Owned event(unused_.back().release(), {shared_from_this()});
    unused_.pop_back();
    return event;
  }
  unused_.reserve(made_ + 1);  // so that no event needs memory to come back
  cudaEvent_t made = nullptr;
  check(cudaEventCreateWithFlags(&made, cudaEventDefault), "cudaEventCreate", device_);
  ++made_;
  return Owned(made, {shared_from_this()});
}

void TimingEvents::give_back(cudaEvent_t event) noexcept {
  const std::lock_guard lock(mutex_);
  unused_.emplace_back(event);
}

}  // namespace lockstep::cuda
