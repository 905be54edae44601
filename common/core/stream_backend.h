#pragma once
// Streams and events as a backend implements them. Code that only uses them includes stream.h.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/core/stream.h"

namespace lockstep {

/// The time when a stream reached a point, by its device's clock. A TimedEvent keeps it.
class EventTime {
 public:
  virtual ~EventTime() = default;
  /// Seconds from `earlier`, of the same stream, to this point. The stream has reached both.
  virtual double seconds_since(const EventTime& earlier) const = 0;
};

class StreamBackend;

/// An operation of a stream's timeline.
struct SpanPlace {
  const StreamBackend* stream;
  size_t number;  // in its timeline()
};

/// One executed operation, for the trace: times in nanoseconds of the steady clock.
struct Span {
  const char* op;            // "conv2d_forward"
  const std::string* scope;  // "conv1", "forward 2/conv1"; nullptr outside any ScopedRange
  int64_t begin_ns;
  int64_t end_ns;
  int64_t queued_ns = 0;  // when the host enqueued it
  // Known of simulated streams alone:
  int64_t sent_bytes = 0;          // to other devices and ranks
  std::vector<SpanPlace> after{};  // what it had to wait for on other streams, by events
};

/// Bytes that were allocated (negative: freed), and when the stream reached that. For the trace.
struct MemoryChange {
  int64_t at_ns;
  int64_t bytes;
};

/// A stream as a backend implements it. All public members but block() and drain() return at once.
class StreamBackend {
 public:
  StreamBackend(Device& device, std::string name) : device_(device), name_(std::move(name)) {}
  virtual ~StreamBackend() = default;
  StreamBackend(const StreamBackend&) = delete;
  StreamBackend& operator=(const StreamBackend&) = delete;

  Device& device() const { return device_; }
  const std::string& name() const { return name_; }
  /// Sets whose work this stream does ("stage 1 (cpu:1, conv2 to flatten)"). Its failures then name
  /// the owner instead of the device.
  void set_owner(std::string owner) { owner_ = std::move(owner); }

  virtual uint64_t record() = 0;
  virtual std::shared_ptr<const EventTime> record_time() = 0;
  virtual void wait(const Event& event) = 0;
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  /// Runs `body` on a thread of the host, as one operation named `op` (a literal): after what is
  /// already enqueued, before what comes later. The body may block, but not for other work of this
  /// process's GPUs, nor for another body. CUDA may run all bodies of a process on one thread. It
  /// makes no CUDA calls and holds no device memory. Like a kernel it captures raw pointers and
  /// values. An exception that leaves it poisons the stream (on a GPU all streams of the device),
  /// as a kernel's error does. Later bodies are not run. A host task cannot be part of a graph.
  virtual void host_task(const char* op, std::function<void()> body) = 0;
  virtual void* allocate(size_t bytes) = 0;
  /// Frees the memory in the order of the stream. Memory that is released during a capture is freed
  /// when the graph is destroyed.
  virtual void release(void* memory, size_t bytes) = 0;
  /// Records an event first: during the capture, drain() waits for this event.
  virtual void begin_capture() = 0;
  /// The graph keeps the memory that was released during the capture. If an error left no graph,
  /// this memory is freed, and the stream goes on.
  virtual std::unique_ptr<Graph> end_capture() = 0;
  virtual void launch(Graph& graph) = 0;

  virtual bool done(uint64_t ticket) const = 0;
  /// Blocks the calling thread until `ticket` is done; does not throw the stream's error.
  virtual void block(uint64_t ticket) const = 0;
  /// Blocks the calling thread until all enqueued work has run, but not work in a capture. Throws
  /// nothing, since destructors call it: whoever waits for an event gets the stream's error.
  void drain() noexcept;
  /// The stream's first error, or null. Read it only after waiting for the event in question.
  virtual std::exception_ptr error() const = 0;
  /// Throws the stream's error, if there is one. If the stream has an owner, this is a PeerLost
  /// that names the owner.
  void throw_error() const;

  /// If a queued wait refers to `this`, the backend calls these two before and after the wait. They
  /// order nothing (relaxed, release) before the stream's end, which acquires.
  void await_begins() { awaited_.fetch_add(1, std::memory_order_relaxed); }
  void await_ends() { awaited_.fetch_sub(1, std::memory_order_release); }

  /// Opens a scope of the trace, within the present one, for the work enqueued from here on.
  virtual void push_scope(std::string_view name);
  virtual void pop_scope();
  /// The operations that have run so far, in order; empty unless the device was opened with
  /// tracing. Call it after synchronize().
  virtual std::vector<Span> timeline() const = 0;
  /// The same for the changes of the device's memory that are in this stream's order.
  virtual std::vector<MemoryChange> memory_changes() const = 0;
  /// The system's number of the thread that runs the operations; 0 if no thread of the host does,
  /// or if that thread has not begun.
  virtual int thread() const { return 0; }

 protected:
  /// The number of slots for events. A slot that was recorded anew holds a later event, which also
  /// answers for the earlier ones.
  static constexpr uint64_t kEventRing = 4096;
  static StreamBackend& stream_of(const Event& event) { return *event.stream_; }
  static uint64_t ticket_of(const Event& event) { return event.ticket_; }
  uint64_t new_ticket() { return ++last_ticket_; }
  /// The scope of work that is enqueued now; null outside all scopes. Lives as long as the stream.
  const std::string* scope() const { return scopes_.empty() ? nullptr : scopes_.back(); }
  /// Whether work is being captured instead of run.
  virtual bool is_capturing() const = 0;
  /// Throws BadInput during a capture.
  void refuse_in_capture(const char* op) const;
  /// The error that this stream reports if it waited for `source` and `source` has this `error`. If
  /// the source is on another device or has an owner, the new error names who failed.
  std::exception_ptr failure_of(const StreamBackend& source, std::exception_ptr error) const;
  /// Call it at the end: a stream must live while others still have to wait for its events.
  void block_until_unawaited() const;

 private:
  Device& device_;
  std::string name_, owner_;
  uint64_t last_ticket_ = 0;
  std::vector<const std::string*> scopes_;
  std::unordered_set<std::string> scope_names_;
  std::atomic<int64_t> awaited_{0};  // waits for events of this stream, queued in others
};

/// A value that queued tasks keep alive together: the value lives as long as one of the copies, on
/// any thread. Like std::shared_ptr, but counting the copies does not order the threads. With a
/// shared_ptr, a host copies a reference for the next task. This copy would be ordered after all
/// that earlier tasks did before they dropped their references. Then ThreadSanitizer would not see
/// that a stream does not wait for these tasks.
template <class T>
class Kept {
 public:
  explicit Kept(T value) : block_(new Block{std::move(value)}) {}
  Kept(const Kept& other) : block_(other.block_) {
    block_->copies.fetch_add(1, std::memory_order_relaxed);
  }
  Kept& operator=(const Kept&) = delete;
  ~Kept() {
    if (block_->copies.fetch_sub(1, std::memory_order_release) > 1) return;
    block_->copies.load(std::memory_order_acquire);  // the last one comes after all others
    delete block_;
  }
  T& operator*() const { return block_->value; }
  T* operator->() const { return &block_->value; }

 private:
  struct Block {
    T value;
    std::atomic<int> copies{1};
  };
  Block* block_;
};

/// The trace's name for a range within the range `outer` (nullptr: within none): "forward 2/conv1".
/// A layer whose name begins with its block's, "block1.conv1" within "block1", does not repeat it.
std::string scope_within(const std::string* outer, std::string_view name);

}  // namespace lockstep
