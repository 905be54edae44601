#pragma once
// Streams and events: the order of work on a device.
//
// A stream runs the operations given to it one after another, asynchronously to the host thread
// that gave them. An event is a point in a stream that another stream, or the host, can wait for.
// Two streams know nothing of each other's progress unless one waits for an event of the other:
// on a GPU and, because the CPU backend keeps to the same rules, on CPU devices too.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep {

class Device;
class EventTime;
class Kernels;
class StreamBackend;  // what a device implements: stream_backend.h

/// A point in the order of one stream. Made only by Stream::record(), so that code cannot name an
/// event that was never recorded. A value: copy it freely; it is valid as long as its device lives.
/// Mirrors cudaEvent_t.
class Event {
 public:
  /// True once everything enqueued before the event has run. Never blocks.
  bool done() const;
  /// Blocks the host until done() is true; rethrows the stream's first error.
  void synchronize() const;

 private:
  friend class StreamBackend;
  friend class Stream;
  friend class TimedEvent;
  Event(StreamBackend& stream, uint64_t ticket) : stream_(&stream), ticket_(ticket) {}
  StreamBackend* stream_;
  uint64_t ticket_;  // 1, 2, 3, ... in the order of the stream's record() calls
};

/// An event that can also give its time, as long as a copy of it exists, whatever the stream
/// records later. Made by Stream::record_time(). Mirrors a cudaEvent_t with timing; Event has no
/// timing.
class TimedEvent {
 public:
  bool done() const { return event_.done(); }
  void synchronize() const { event_.synchronize(); }
  /// The same point without its time, for other streams to wait for.
  const Event& event() const { return event_; }
  /// Seconds from an earlier event of the same stream to this one, by the device's clock; negative
  /// for a later one. Blocks until both have come. Throws BadInput for events of two streams.
  double seconds_since(const TimedEvent& earlier) const;

 private:
  friend class Stream;
  TimedEvent(std::shared_ptr<const EventTime> time, Event event)
      : time_(std::move(time)), event_(event) {}
  std::shared_ptr<const EventTime> time_;
  Event event_;  // right after the point
};

/// Work of one stream that was recorded instead of run, and can then be run any number of times. It
/// keeps the addresses and values it was recorded with. Must be destroyed before its device.
/// Mirrors cudaGraphExec_t.
class Graph {
 public:
  virtual ~Graph() = default;
};

/// Handle to a stream of a device: a pointer, copied freely. The device owns the stream and drains
/// it before destroying it. One host thread enqueues at a time. Mirrors cudaStream_t.
class Stream {
 public:
  explicit Stream(StreamBackend& backend) : backend_(&backend) {}

  Device& device() const;
  /// The operations that can be enqueued on this stream (kernels/kernels.h).
  Kernels& kernels() const;
  const std::string& name() const;
  StreamBackend& backend() const { return *backend_; }

  /// Marks the point after everything enqueued so far (cudaEventRecord).
  Event record() const;
  /// The same, with the time at which the stream reaches it.
  TimedEvent record_time() const;
  /// Work that is enqueued from now on starts after `event`; the host does not wait
  /// (cudaStreamWaitEvent).
  /// An error of the event's stream becomes this stream's error. If that stream is on another
  /// device, the error becomes a PeerLost that names the device.
  void wait(const Event& event) const;
  /// Blocks the host until all enqueued work has run. Rethrows the first error. The error stays: a
  /// stream that failed once skips all later work (a "sticky" error of CUDA).
  void synchronize() const { record().synchronize(); }
  /// Enqueues a copy of bytes between host and device memory in any direction. Both sides must
  /// live, and the source stay unchanged, until an event after the copy is done.
  void copy(void* to, const void* from, size_t bytes) const;

  /// From here on operations and copies are recorded instead of run; recording events is refused
  /// (cudaStreamBeginCapture). Memory that buffers free stays with the graph, which may use it.
  void begin_capture() const;
  /// Ends the recording (cudaStreamEndCapture, cudaGraphInstantiate).
  std::unique_ptr<Graph> end_capture() const;
  /// Enqueues everything that was recorded, as it stands (cudaGraphLaunch).
  void launch(Graph& graph) const;

  friend bool operator==(const Stream& a, const Stream& b) { return a.backend_ == b.backend_; }

 private:
  StreamBackend* backend_;
};

/// Names the work that is enqueued while this object lives, for the trace (an NVTX range on CUDA).
class ScopedRange {
 public:
  ScopedRange(Stream stream, std::string_view name);
  ~ScopedRange();
  ScopedRange(const ScopedRange&) = delete;
  ScopedRange& operator=(const ScopedRange&) = delete;

 private:
  Stream stream_;
};

}  // namespace lockstep
