#pragma once
// When the operations of a stream ran, from events that can give their time.

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/core/stream_backend.h"
#include "common/kernels/cuda/check.h"

namespace lockstep::cuda {

/// The events with times of one stream. Making an event is a call of the driver. So an event is
/// recorded anew, but only if nobody can ask for its time any more. May be used by several threads.
class TimingEvents : public std::enable_shared_from_this<TimingEvents> {
  struct GiveBack {
    std::shared_ptr<TimingEvents> pool;  // an event may outlive its stream
    void operator()(cudaEvent_t event) const noexcept { pool->give_back(event); }
  };

 public:
  /// The owner of an event may ask for its time, whatever the stream records later.
  using Owned = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, GiveBack>;

  explicit TimingEvents(std::string device) : device_(std::move(device)) {}

  /// An event to record in that stream, whose GPU must be current.
  Owned take();

 private:
  void give_back(cudaEvent_t event) noexcept;

  const std::string device_;
  std::mutex mutex_;
  size_t made_ = 0;
  std::vector<EventHandle> unused_;
};

/// Puts an event before and after every operation, and one after every change of memory. The GPU's
/// clock is tied to the host's by an event for which the host waits at the start. From there on
/// times are differences of events.
class SpanRecorder {
 public:
  SpanRecorder(cudaStream_t stream, std::string device, std::shared_ptr<TimingEvents> events);

  void begin(const char* op, const std::string* scope);
  void end();
  /// The spans of the operations that have ended. Never waits: the queued operations may wait for a
  /// rank, and nobody would watch for that rank.
  const std::vector<Span>& spans();

  /// Notes that the stream allocates bytes (frees: negative) at this point of its order.
  void memory(int64_t bytes) { pending_memory_.push_back({recorded_event(), bytes}); }
  /// The same for a change that happens now, whatever is queued.
  void memory_at_once(int64_t bytes);
  /// The changes that the stream has reached.
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
  static constexpr size_t kManyPending = 4096;

  TimingEvents::Owned recorded_event();
  bool has_come(const TimingEvents::Owned& event) const;
  int64_t time_of(const TimingEvents::Owned& event) const;
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
