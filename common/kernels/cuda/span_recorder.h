#pragma once
// When each operation of a stream ran, from events around it.

#include <deque>
#include <vector>

#include "common/core/stream_backend.h"
#include "common/kernels/cuda/check.h"

namespace lockstep::cuda {

/// Puts an event before and after every operation. The GPU's clock is tied to the host's by an
/// event for which the host waits at the start; from there on times are differences of events.
class SpanRecorder {
 public:
  SpanRecorder(cudaStream_t stream, std::string device);

  void begin(const char* op, const std::string* scope);
  void end();
  /// All spans so far. Waits for the operations that are still queued.
  const std::vector<Span>& spans();

 private:
  struct Pending {
    const char* op;
    const std::string* scope;
    EventHandle begin, end;
  };
  static constexpr size_t kMostPending = 4096;

  EventHandle recorded_event();
  void resolve();

  cudaStream_t stream_;
  std::string device_;
  EventHandle origin_;  // and its time:
  int64_t origin_ns_ = 0;
  std::deque<Pending> pending_;
  std::vector<EventHandle> unused_;
  std::vector<Span> spans_;
};

}  // namespace lockstep::cuda
