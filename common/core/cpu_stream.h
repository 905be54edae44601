#pragma once
// The stream of a CPU device: one thread with a queue of tasks.
//
// The queue is built so that a stream's progress tells other threads nothing unless they wait for
// an event. A mutex, or a reference count that both sides touch, would order the worker before the
// host and so hide a missing wait from ThreadSanitizer. Here the host links a task with a
// release-store, the worker follows with an acquire-load, and the worker alone frees the nodes:
// knowledge flows from host to worker only. The only way back is Event.

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "common/core/stream_backend.h"

namespace lockstep {

class CpuStream : public StreamBackend {
 public:
  CpuStream(Device& device, std::string name);
  /// Runs what is still queued and joins the worker. Then blocks until no other stream, of this
  /// device or another, still has to wait for an event of this stream.
  ~CpuStream() override;

  /// Enqueues `body` as one operation named `op` (a literal). Like a kernel launch, `body` captures
  /// raw pointers and values, never a Tensor or a Stream. An exception that leaves `body` poisons
  /// the stream: later operations are skipped.
  void enqueue(const char* op, std::function<void()> body);
  /// The same for work that must happen even on a poisoned stream: events, times, waits, frees. A
  /// collective is a host_task(), which a poisoned stream skips.
  void enqueue_control(const char* op, std::function<void()> body);
  /// The state that the worker thread keeps between tasks (an engine and its workspaces). Only
  /// tasks may touch it. The worker destroys this state before the worker ends.
  std::shared_ptr<void>& worker_state() { return worker_state_; }
  /// Counts bytes that a task itself has taken (negative: given back). Only tasks may call this.
  void count_workspace(int64_t change);

  uint64_t record() override;
  std::shared_ptr<const EventTime> record_time() override;
  void wait(const Event& event) override;
  void copy(void* to, const void* from, size_t bytes) override;
  void host_task(const char* op, std::function<void()> body) override;
  void* allocate(size_t bytes) override;
  void release(void* memory, size_t bytes) override;
  void begin_capture() override;
  std::unique_ptr<Graph> end_capture() override;
  void launch(Graph& graph) override;
  bool done(uint64_t ticket) const override {
    return events_[ticket % kEventRing].load(std::memory_order_acquire) >= ticket;
  }
  void block(uint64_t ticket) const override;
  std::exception_ptr error() const override;
  void push_scope(std::string_view name) override {
    if (tracing_) StreamBackend::push_scope(name);
  }
  void pop_scope() override {
    if (tracing_) StreamBackend::pop_scope();
  }
  std::vector<Span> timeline() const override { return spans_; }
  std::vector<MemoryChange> memory_changes() const override { return memory_changes_; }
  int thread() const override { return thread_.load(std::memory_order_relaxed); }

 private:
  struct Task {
    std::function<void()> body;  // empty: the worker ends
    const char* op = "";
    const std::string* scope = nullptr;
    bool control = false;
    int64_t queued_ns = 0;  // for the trace
    std::atomic<Task*> next{nullptr};
  };
  struct Time;       // of an event
  struct Recording;  // a Graph: operations that have not run yet
  // Events are kept in a ring. Ticket t uses slot t mod size; a slot that has moved on to a later
  // ticket of the same stream still answers "done" for the earlier one.

  bool is_capturing() const override { return recording_ != nullptr; }
  void trace_memory(int64_t change);
  void link(const char* op, const std::string* scope, std::function<void()> body, bool control);
  void work(Task* first);
  void chaos();
  void fail_with(std::exception_ptr error);

  const int chaos_us_;  // first: where it is refused, nothing else is there yet
  // Host side.
  Task* last_;
  std::unique_ptr<Recording> recording_;  // during a capture
  // Shared, each in one direction only.
  std::atomic<int> pushed_{0};           // host -> worker: wakes a sleeping worker
  mutable std::atomic<int> signals_{0};  // worker -> waiters: wakes sleeping waiters
  std::array<std::atomic<uint64_t>, kEventRing> events_{};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;    // written before failed_
  std::atomic<int> thread_{0};  // the worker's number
  // Worker side.
  const bool tracing_;
  const int64_t spin_ns_;  // of who waits for this stream or in it, before they sleep
  uint32_t chaos_state_;   // seeded with the names of device and stream
  std::shared_ptr<void> worker_state_;
  std::vector<Span> spans_;
  std::vector<MemoryChange> memory_changes_;
  std::thread worker_;  // last: starts when everything else is there
};

}  // namespace lockstep
