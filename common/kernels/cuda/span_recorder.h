#pragma once
// When each operation of a stream ran, from events around it.

#include <deque>
#include <vector>

#include "common/core/stream_backend.h"
#include "common/kernels/cuda/timing_events.h"

namespace lockstep::cuda {

/// Puts an event before and after every operation, and one behind every change of memory. The GPU's
/// clock is tied to the host's by an event for which the host waits at the start; from there on
/// times are differences of events.
class SpanRecorder {
 public:
  SpanRecorder(cudaStream_t stream, std::string device, std::shared_ptr<TimingEvents> events);

  void begin(const char* op, const std::string* scope);
  void end();
  /// All spans so far. Waits for the operations that are still queued.
  const std::vector<Span>& spans();

  /// Notes that the stream allocates bytes (frees: negative) at this point of its order.
  void memory(int64_t bytes) { pending_memory_.push_back({recorded_event(), bytes}); }
  /// The same for what happens now, whatever is queued.
  void memory_at_once(int64_t bytes);
  /// All changes so far. Waits as spans() does.
  const std::vector<MemoryChange>& memory_changes();

 private:
  struct Pending {
    const char* op;
    const std::string* scope;
    TimingEvents::Owned begin, end;
    int64_t queued_ns = 0;
  };
  struct PendingMemory {
    TimingEvents::Owned at;
    int64_t bytes;
  };
  static constexpr size_t kMostPending = 4096;

  TimingEvents::Owned recorded_event();
  void resolve();

  cudaStream_t stream_;
  std::string device_;
  std::shared_ptr<TimingEvents> events_;
  TimingEvents::Owned origin_;  // and its time:
  int64_t origin_ns_ = 0;
  std::deque<Pending> pending_;
  std::deque<PendingMemory> pending_memory_;
  std::vector<Span> spans_;
  std::vector<MemoryChange> memory_changes_;
};

}  // namespace lockstep::cuda
