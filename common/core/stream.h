#pragma once
// Streams and events: the order of work on a device.
//
// A stream runs the operations given to it one after another, asynchronously to the host thread
// that gave them. An event is a point in a stream that another stream, or the host, can wait for.
// Two streams know nothing of each other's progress unless one waits for an event of the other:
// on a GPU and, because the CPU backend keeps to the same rules, on CPU devices too.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

class Device;
class Kernels;
class StreamBackend;

/// A point in the order of one stream. Made only by Stream::record(), so that an event which was
/// never recorded cannot be written down. A value: copy it freely; it is valid as long as its
/// device. Mirrors cudaEvent_t.
class Event {
 public:
  /// True once everything enqueued before the event has run. Never blocks.
  bool done() const;
  /// Blocks the host until then; rethrows the stream's first error.
  void synchronize() const;

 private:
  friend class StreamBackend;
  friend class Stream;
  friend class TimedEvent;
  Event(StreamBackend& stream, uint64_t ticket) : stream_(&stream), ticket_(ticket) {}
  StreamBackend* stream_;
  uint64_t ticket_;  // 1, 2, 3, ... in the order of the stream's record() calls
};

/// When a stream came to a point, by its device's clock: what a backend keeps of a TimedEvent.
class EventTime {
 public:
  virtual ~EventTime() = default;
  /// Seconds from `earlier`, of the same stream. Both have come.
  virtual double seconds_since(const EventTime& earlier) const = 0;
};

/// An event that can also be asked for its time, as long as there is a copy of it, whatever the
/// stream records then. Made by Stream::record_time(). Mirrors a cudaEvent_t with timing; Event is
/// one without.
class TimedEvent {
 public:
  bool done() const { return event_.done(); }
  void synchronize() const { event_.synchronize(); }
  /// Seconds from an earlier event of the same stream to this one, by the device's clock; negative
  /// for a later one. Blocks until both have come. Throws BadInput for events of two streams.
  double seconds_since(const TimedEvent& earlier) const;

 private:
  friend class Stream;
  TimedEvent(std::shared_ptr<const EventTime> time, Event event)
      : time_(std::move(time)), event_(event) {}
  std::shared_ptr<const EventTime> time_;
  Event event_;  // right behind the point
};

/// One executed operation, for the trace: times in nanoseconds of the steady clock.
struct Span {
  const char* op;            // "conv2d_forward"
  const std::string* scope;  // "conv1", "forward 2/conv1"; nullptr outside any ScopedRange
  int64_t begin_ns;
  int64_t end_ns;
};

/// Work of one stream that was recorded instead of run, to be run as often as one likes. It keeps
/// the addresses and values it was recorded with. Goes before its device. Mirrors cudaGraphExec_t.
class Graph {
 public:
  virtual ~Graph() = default;
};

/// What a backend implements. Every member but block() and synchronize() returns at once.
class StreamBackend {
 public:
  StreamBackend(Device& device, std::string name) : device_(device), name_(std::move(name)) {}
  virtual ~StreamBackend() = default;
  StreamBackend(const StreamBackend&) = delete;
  StreamBackend& operator=(const StreamBackend&) = delete;

  Device& device() const { return device_; }
  const std::string& name() const { return name_; }
  /// Whose work this stream does ("stage 1 (cpu:1, conv2 to flatten)"): its failures name that
  /// instead of the device.
  void set_owner(std::string owner) { owner_ = std::move(owner); }

  virtual uint64_t record() = 0;
  virtual std::shared_ptr<const EventTime> record_time() = 0;
  virtual void wait(const Event& event) = 0;
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  /// Runs `body` on a thread of the host, as one operation named `op` (a literal): behind what is
  /// enqueued already, before what comes. It may block, but not for other work of this process's
  /// GPUs, nor for another body: CUDA may run all bodies of a process on one thread. It makes no
  /// calls of CUDA and holds no device's memory. Like a kernel it captures raw pointers and values.
  /// An exception that leaves it poisons the stream, on a GPU all streams of the device, as a
  /// kernel's error does; bodies that come then are not run. Cannot be part of a graph.
  virtual void host_task(const char* op, std::function<void()> body) = 0;
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* memory) = 0;
  virtual void begin_capture() = 0;
  virtual std::unique_ptr<Graph> end_capture() = 0;
  virtual void launch(Graph& graph) = 0;

  virtual bool done(uint64_t ticket) const = 0;
  /// Blocks the calling thread until `ticket` is done; does not throw the stream's error.
  virtual void block(uint64_t ticket) const = 0;
  /// The stream's first error, or null. Read it after the event that it is to be asked for.
  virtual std::exception_ptr error() const = 0;
  /// Throws it, if there is one; of a stream with an owner as PeerLost naming that.
  void throw_error() const;

  /// A backend whose queued waits refer to `this` brackets them with these two. They order nothing
  /// (relaxed, release) before the stream's end, which acquires.
  void await_begins() { awaited_.fetch_add(1, std::memory_order_relaxed); }
  void await_ends() { awaited_.fetch_sub(1, std::memory_order_release); }

  virtual void push_scope(std::string_view name) = 0;
  virtual void pop_scope() = 0;
  /// What ran so far, in order; empty unless the device was opened with tracing. Call it after
  /// synchronize().
  virtual std::vector<Span> timeline() const = 0;

 protected:
  /// The places for events. One that was recorded anew stands for its later event, too.
  static constexpr uint64_t kEventRing = 1024;
  static StreamBackend& stream_of(const Event& event) { return *event.stream_; }
  static uint64_t ticket_of(const Event& event) { return event.ticket_; }
  uint64_t new_ticket() { return ++last_ticket_; }
  /// What a stream that waited for `source` is to report of `error`: on another device, or where
  /// the source has an owner, it names who failed.
  std::exception_ptr failure_of(const StreamBackend& source, std::exception_ptr error) const;
  /// To be called at the end: a stream stays while others still have to wait for its events.
  void block_until_unawaited() const;

 private:
  Device& device_;
  std::string name_, owner_;
  uint64_t last_ticket_ = 0;
  std::atomic<int64_t> awaited_{0};  // waits for events of this stream, queued in others
};

/// Handle to a stream of a device: a pointer, copied freely. The device owns the stream and drains
/// it before it goes. One host thread enqueues at a time. Mirrors cudaStream_t.
class Stream {
 public:
  explicit Stream(StreamBackend& backend) : backend_(&backend) {}

  Device& device() const { return backend_->device(); }
  /// The operations that can be enqueued on this stream (kernels/kernels.h).
  Kernels& kernels() const;
  const std::string& name() const { return backend_->name(); }
  StreamBackend& backend() const { return *backend_; }

  /// Marks the point behind everything enqueued so far (cudaEventRecord).
  Event record() const { return Event(*backend_, backend_->record()); }
  /// The same, with the time at which the stream comes to it.
  TimedEvent record_time() const {
    std::shared_ptr<const EventTime> time = backend_->record_time();
    return TimedEvent(std::move(time), record());
  }
  /// What is enqueued from now on starts after `event`; the host goes on (cudaStreamWaitEvent).
  /// An error of the event's stream becomes this stream's error; as PeerLost, naming the device, if
  /// that is another one.
  void wait(const Event& event) const { backend_->wait(event); }
  /// Blocks the host until the stream has run dry. Rethrows the first error; it stays: a stream
  /// that failed once skips all later work (a "sticky" error of CUDA).
  void synchronize() const { record().synchronize(); }
  /// Enqueues a copy of bytes between host and device memory in any direction. Both sides must
  /// live, and the source stay unchanged, until an event behind the copy is done.
  void copy(void* to, const void* from, size_t bytes) const { backend_->copy(to, from, bytes); }

  /// From here on operations and copies are recorded instead of run; events, and buffers that are
  /// freed, are refused (cudaStreamBeginCapture).
  void begin_capture() const { backend_->begin_capture(); }
  /// Ends the recording (cudaStreamEndCapture, cudaGraphInstantiate).
  std::unique_ptr<Graph> end_capture() const { return backend_->end_capture(); }
  /// Enqueues everything that was recorded, as it stands (cudaGraphLaunch).
  void launch(Graph& graph) const { backend_->launch(graph); }

  friend bool operator==(const Stream& a, const Stream& b) { return a.backend_ == b.backend_; }

 private:
  StreamBackend* backend_;
};

/// What the trace calls a range within the range `outer` (nullptr: within none): "forward 2/conv1".
/// A layer that bears its block's name, "block1.conv1" within "block1", does not get it twice.
std::string scope_within(const std::string* outer, std::string_view name);

/// Names what is enqueued within its lifetime, for the trace (an NVTX range on CUDA).
class ScopedRange {
 public:
  ScopedRange(Stream stream, std::string_view name) : stream_(stream) {
    stream_.backend().push_scope(name);
  }
  ~ScopedRange() { stream_.backend().pop_scope(); }
  ScopedRange(const ScopedRange&) = delete;
  ScopedRange& operator=(const ScopedRange&) = delete;

 private:
  Stream stream_;
};

}  // namespace lockstep
