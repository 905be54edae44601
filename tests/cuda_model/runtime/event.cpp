// Events: points in a stream that the host and other streams can wait for.

#include <algorithm>
#include <chrono>
#include <set>

#include "runtime/model.h"
#include "runtime/sanitizer.h"

namespace cuda_model {

/// One cudaEventRecord. Those who wait keep it, so an event may be recorded again or destroyed.
struct Record {
  // A record in a captured stream is no point in time; it orders the graph.
  std::shared_ptr<Capture> capture;
  CUstream_st* captured_stream = nullptr;
  size_t operations = 0;

  std::mutex mutex;
  std::condition_variable reached;
  bool done = false;
  std::chrono::steady_clock::time_point time;

  void mark() {
    const std::lock_guard lock(mutex);
    time = std::chrono::steady_clock::now();
    done = true;
    reached.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    reached.wait(lock, [&] { return done; });
  }
  bool is_done() {
    const std::lock_guard lock(mutex);
    return done;
  }
};

/// A stream of the same capture waited for `record`; in this way another stream joins the capture.
cudaError_t wait_in_capture(CUstream_st& stream, const Record& record) {
  const std::lock_guard lock(model_mutex());
  if (record.capture == nullptr) {  // work outside the graph
    stream.capture->invalidated = true;
    return cudaErrorStreamCaptureIsolation;
  }
  if (stream.capture != nullptr && stream.capture != record.capture) {
    stream.capture->invalidated = record.capture->invalidated = true;
    return cudaErrorStreamCaptureMerge;
  }
  if (record.capture->origin == nullptr) return cudaErrorCapturedEvent;  // that capture has ended
  if (stream.capture == nullptr) {
    stream.capture = record.capture;
    stream.captured_operations = stream.joined_operations = 0;
    record.capture->streams.push_back(&stream);
  }
  CUstream_st& other = *record.captured_stream;
  if (&other != &stream) {
    other.joined_operations = std::max(other.joined_operations, record.operations);
    ++stream.captured_operations;  // a stream that waits must be joined itself
  }
  return cudaSuccess;
}

}  // namespace cuda_model

struct CUevent_st {
  cuda_model::Device* device;
  unsigned int flags;
  std::shared_ptr<cuda_model::Record> last;  // null: never recorded
};

using namespace cuda_model;

namespace {

std::set<cudaEvent_t>& registry() {
  static auto& events = *new std::set<cudaEvent_t>;
  return events;
}

bool exists(cudaEvent_t event) {
  const std::lock_guard lock(model_mutex());
  return registry().count(event) > 0;
}

cudaError_t sticky_of(cudaEvent_t event) {
  return static_cast<cudaError_t>(event->device->sticky.load());
}

/// What forbids asking for the state of `event`, if anything.
cudaError_t refuse_question(cudaEvent_t event) {
  if (!exists(event)) return cudaErrorInvalidResourceHandle;
  if (event->last != nullptr && event->last->capture != nullptr) {
    const std::lock_guard lock(model_mutex());
    event->last->capture->invalidated = true;
    return cudaErrorCapturedEvent;
  }
  return forbid_in_capture();
}

}  // namespace

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  return api("cudaEventCreateWithFlags", [&] {
    Device* device = current_device();
    if (device == nullptr) return cudaErrorNoDevice;
    if (const cudaError_t sticky = sticky_error()) return sticky;
    if (event == nullptr || flags > (cudaEventBlockingSync | cudaEventDisableTiming)) {
      return cudaErrorInvalidValue;
    }
    const std::lock_guard lock(model_mutex());
    *event = *registry().insert(new CUevent_st{device, flags, nullptr}).first;
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return api("cudaEventDestroy", [&] {
    const std::lock_guard lock(model_mutex());
    if (registry().erase(event) == 0) return cudaErrorInvalidResourceHandle;
    delete event;
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  return api("cudaEventRecord", [&] {
    const auto stream = find_stream(handle);
    if (stream == nullptr || !exists(event) || event->device != &stream->device) {
      return cudaErrorInvalidResourceHandle;
    }
    if (const cudaError_t sticky = sticky_of(event)) return sticky;
    const auto record = make_shared_by_threads<Record>();
    const std::lock_guard lock(model_mutex());
    if (stream->capture != nullptr) {
      if (stream->capture->invalidated) return cudaErrorStreamCaptureInvalidated;
      record->capture = stream->capture;
      record->captured_stream = stream.get();
      record->operations = stream->captured_operations;
    } else {
      stream->push([record] { record->mark(); });
    }
    event->last = record;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned int flags) {
  return api("cudaStreamWaitEvent", [&] {
    const auto stream = find_stream(handle);
    if (stream == nullptr || !exists(event)) return cudaErrorInvalidResourceHandle;
    if (flags != 0) return cudaErrorInvalidValue;
    if (const int sticky = stream->device.sticky) return static_cast<cudaError_t>(sticky);
    const auto record = event->last;
    if (record == nullptr) return cudaSuccess;  // never recorded: as if it had happened
    if (stream->capture != nullptr || record->capture != nullptr) {
      return wait_in_capture(*stream, *record);
    }
    stream->push([record] { record->wait(); });
    return cudaSuccess;
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return api("cudaEventQuery", [&] {
    if (const cudaError_t error = refuse_question(event)) return error;
    if (const cudaError_t sticky = sticky_of(event)) return sticky;
    return event->last == nullptr || event->last->is_done() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return api("cudaEventSynchronize", [&] {
    if (const cudaError_t error = refuse_question(event)) return error;
    if (const auto record = event->last) record->wait();
    return sticky_of(event);
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return api("cudaEventElapsedTime", [&] {
    for (const cudaEvent_t event : {start, end}) {
      if (!exists(event) || event->last == nullptr || event->flags & cudaEventDisableTiming) {
        return cudaErrorInvalidResourceHandle;
      }
      if (event->last->capture != nullptr) return cudaErrorCapturedEvent;
      if (const cudaError_t sticky = sticky_of(event)) return sticky;
      if (!event->last->is_done()) return cudaErrorNotReady;
    }
    const std::chrono::duration<float, std::milli> span = end->last->time - start->last->time;
    *milliseconds = span.count();
    return cudaSuccess;
  });
}
