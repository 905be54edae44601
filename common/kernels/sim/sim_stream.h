#pragma once
// The stream of a simulated device: no thread, no queue. Duration and begin of an operation are
// known when it is enqueued. An operation begins when the stream is free, the host has come to it,
// and all that the stream waits for has happened.

#include <algorithm>
#include <array>
#include <memory>

#include "common/core/stream_backend.h"
#include "common/kernels/sim/profile.h"
#include "common/kernels/sim/sim_host.h"

namespace lockstep {

class SimStream final : public StreamBackend {
 public:
  SimStream(Device& device, std::string name, SimHost& host, const Profile& profile);
  ~SimStream() override;

  /// Enqueues an operation named `op` (a literal) that takes so long, and sends so many bytes.
  void enqueue(const char* op, int64_t ns, int64_t sent_bytes = 0);
  /// The time since which the stream has had work without a pause.
  int64_t busy_since() const { return busy_since_; }
  /// The time when all enqueued work has run.
  int64_t free_at() const { return free_at_; }
  /// The time when an operation begins that the host enqueues now.
  int64_t begin_of_next() const { return std::max(free_at_, host_.now() + profile_.launch_ns); }
  /// Work that is enqueued from now on does not begin before `ns`.
  void wait_until(int64_t ns);
  SimHost& host() const { return host_; }
  const Profile& profile() const { return profile_; }
  /// Nanoseconds of an operation on this device, beside the others of its host.
  int64_t operation_ns(const OperationCost& cost, double flops, double bytes) const;

  uint64_t record() override;
  std::shared_ptr<const EventTime> record_time() override;
  void wait(const Event& event) override;
  void copy(void* to, const void* from, size_t bytes) override;
  /// Throws BadInput: a simulated device has nobody to run `body`.
  void host_task(const char* op, std::function<void()> body) override;
  void* allocate(size_t bytes) override;
  void release(void* memory, size_t bytes) override;
  void begin_capture() override;
  std::unique_ptr<Graph> end_capture() override;
  void launch(Graph& graph) override;
  bool done(uint64_t ticket) const override { return time_of(ticket) <= host_.now(); }
  void block(uint64_t ticket) const override { host_.wait_until(time_of(ticket)); }
  std::exception_ptr error() const override { return nullptr; }
  std::vector<Span> timeline() const override { return spans_; }
  std::vector<MemoryChange> memory_changes() const override { return memory_changes_; }

 private:
  struct Operation {
    const char* op;
    const std::string* scope;
    int64_t ns, sent_bytes;
  };
  /// A point of a stream: its time, and the number of operations before it.
  struct Point {
    int64_t ns = 0;
    size_t operations = 0;
  };
  struct Time;
  struct Recording;

  const Point& point_of(uint64_t ticket) const { return events_[ticket % kEventRing]; }
  int64_t time_of(uint64_t ticket) const { return point_of(ticket).ns; }
  /// The time when the operation that is enqueued next can begin.
  int64_t next_begin() const { return std::max(free_at_, host_.now()); }
  void place(const Operation& operation);
  bool is_capturing() const override { return recording_ != nullptr; }
  void trace_memory(int64_t change);

  SimHost& host_;
  const Profile& profile_;
  const bool tracing_;
  int64_t busy_since_ = 0;
  int64_t free_at_ = 0;                     // when the last operation ends, or wait
  std::array<Point, kEventRing> events_{};  // where each is
  std::vector<SpanPlace> awaited_;          // by what is enqueued next, for the trace
  std::unique_ptr<Recording> recording_;    // during a capture
  std::vector<Span> spans_;
  std::vector<MemoryChange> memory_changes_;
};

}  // namespace lockstep
