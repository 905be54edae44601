#include "common/kernels/cuda/timing.h"

#include <utility>

#include "common/core/host.h"

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

SpanRecorder::SpanRecorder(cudaStream_t stream, std::string device,
                           std::shared_ptr<TimingEvents> events)
    : stream_(stream), device_(std::move(device)), events_(std::move(events)) {
  origin_ = recorded_event();
  check(cudaEventSynchronize(origin_.get()), "cudaEventSynchronize", device_);
  origin_ns_ = steady_ns();
}

TimingEvents::Owned SpanRecorder::recorded_event() {
  TimingEvents::Owned event = events_->take();
  check(cudaEventRecord(event.get(), stream_), "cudaEventRecord", device_);
  return event;
}

void SpanRecorder::begin(const char* op, const std::string* scope) {
  if (!pending_.empty() && !pending_.back().end) pending_.pop_back();  // an exception has left it
  if (pending_.size() >= kManyPending) resolve();
  pending_.push_back({op, scope, recorded_event(), {}, steady_ns()});
}

void SpanRecorder::end() { pending_.back().end = recorded_event(); }

const std::vector<Span>& SpanRecorder::spans() {
  resolve();
  return spans_;
}

void SpanRecorder::memory_at_once(int64_t bytes) {
  memory_changes_.push_back({steady_ns(), bytes});
}

const std::vector<MemoryChange>& SpanRecorder::memory_changes() {
  resolve();
  return memory_changes_;
}

bool SpanRecorder::has_come(const TimingEvents::Owned& event) const {
  const cudaError_t status = event ? cudaEventQuery(event.get()) : cudaErrorNotReady;
  if (status != cudaErrorNotReady) check(status, "cudaEventQuery", device_);
  if (status != cudaSuccess) cudaGetLastError();  // not an error, but CUDA would keep it as one
  return status == cudaSuccess;
}

int64_t SpanRecorder::time_of(const TimingEvents::Owned& event) const {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, origin_.get(), event.get()), "cudaEventElapsedTime",
        device_);
  return origin_ns_ + static_cast<int64_t>(double(milliseconds) * 1e6);
}

/// cudaEventElapsedTime gives float milliseconds: too coarse over hours, exact enough from one
/// batch of operations to the next. So the end of a batch becomes the origin of the next one.
void SpanRecorder::resolve() {
  TimingEvents::Owned last;
  for (; !pending_.empty() && has_come(pending_.front().end); pending_.pop_front()) {
    Pending& p = pending_.front();
    spans_.push_back({p.op, p.scope, time_of(p.begin), time_of(p.end), p.queued_ns});
    last = std::move(p.end);
  }
  for (; !pending_memory_.empty() && has_come(pending_memory_.front().at);
       pending_memory_.pop_front()) {
    const PendingMemory& p = pending_memory_.front();
    memory_changes_.push_back({time_of(p.at), p.bytes});
  }
  if (!last) return;
  origin_ns_ = time_of(last);
  origin_ = std::move(last);
}

}  // namespace lockstep::cuda
