// Streams: one worker thread with a queue each.

#include <pthread.h>

#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

#include "runtime/model.h"
#include "runtime/sanitizer.h"
#include "runtime/turn.h"

namespace cuda_model {
int take_pending_async_fault();

namespace {

std::set<std::shared_ptr<CUstream_st>>& registry() {
  static auto& streams = *new std::set<std::shared_ptr<CUstream_st>>;
  return streams;
}

/// The workers of streams that were destroyed. The process waits for them when it ends: otherwise a
/// leak checker reports what a thread is about to free.
class EndingWorkers {
 public:
  void add(pthread_t worker) {
    const std::lock_guard lock(mutex_);
    std::erase_if(workers_,
                  [](pthread_t other) { return pthread_tryjoin_np(other, nullptr) == 0; });
    workers_.push_back(worker);
  }
  /// At most some seconds: a collective whose other ranks never came does not end.
  void wait() {
    const std::lock_guard lock(mutex_);
    timespec until{};
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 5;
    for (const pthread_t worker : workers_) pthread_timedjoin_np(worker, nullptr, &until);
  }

 private:
  std::mutex mutex_;
  std::vector<pthread_t> workers_;
};

EndingWorkers& ending_workers() {
  static auto& all = []() -> EndingWorkers& {
    std::atexit([] { ending_workers().wait(); });
    return *new EndingWorkers;
  }();
  return all;
}

cudaError_t add(CUstream_st& stream, Task task) {
  Device& device = stream.device;
  if (const int code = take_pending_async_fault()) {
    task = [&device, code] { device.sticky = code; };
  }
  // Moved, not copied: what a task holds goes where the task ran. ThreadSanitizer does not see the
  // model's own reference counts.
  Task guarded = [&device, task = std::move(task)] {
    if (device.sticky == 0) task();
  };
  const std::lock_guard lock(model_mutex());
  if (stream.capture == nullptr) {
    stream.push(std::move(guarded));
    return cudaSuccess;
  }
  if (stream.capture->invalidated) return cudaErrorStreamCaptureInvalidated;
  stream.capture->nodes.push_back(std::move(guarded));
  ++stream.captured_operations;
  return cudaSuccess;
}

}  // namespace

std::shared_ptr<CUstream_st> find_stream(cudaStream_t handle) {
  const std::lock_guard lock(model_mutex());
  for (const auto& stream : registry()) {
    if (stream.get() == handle) return stream;
  }
  return nullptr;
}

std::vector<std::shared_ptr<CUstream_st>> all_streams(const Device* device) {
  const std::lock_guard lock(model_mutex());
  std::vector<std::shared_ptr<CUstream_st>> streams;
  for (const auto& stream : registry()) {
    if (device == nullptr || &stream->device == device) streams.push_back(stream);
  }
  return streams;
}

cudaError_t enqueue(cudaStream_t handle, Task task) {
  const auto stream = find_stream(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (const int sticky = stream->device.sticky) return static_cast<cudaError_t>(sticky);
  return add(*stream, std::move(task));
}

cudaError_t enqueue_kernel(cudaStream_t handle, Task task) {
  const auto stream = find_stream(handle);
  if (stream == nullptr || &stream->device != current_device()) {
    return cudaErrorInvalidResourceHandle;
  }
  return enqueue(handle, [&device = stream->device, task = std::move(task)] {
    const Turn turn(&device);
    task();
  });
}

}  // namespace cuda_model

void CUstream_st::push(cuda_model::Task task) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(task));
  changed_.notify_all();
}

void CUstream_st::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

bool CUstream_st::idle() {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && !busy_;
}

void CUstream_st::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
}

void CUstream_st::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !queue_.empty() || closed_; });
    if (queue_.empty()) return;
    cuda_model::Task task = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    task();
    task = nullptr;  // what it holds is freed before the stream counts as idle
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

using namespace cuda_model;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  return api("cudaStreamCreateWithFlags", [&] {
    Device* device = current_device();
    if (device == nullptr) return cudaErrorNoDevice;
    if (const cudaError_t sticky = sticky_error()) return sticky;
    if (stream == nullptr || flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
    const auto made = make_shared_by_threads<CUstream_st>(*device);
    auto* owned = new std::shared_ptr<CUstream_st>(made);
    const auto work = [](void* of) -> void* {
      const std::unique_ptr<std::shared_ptr<CUstream_st>> stream(
          static_cast<std::shared_ptr<CUstream_st>*>(of));
      (*stream)->work();
      return nullptr;
    };
    if (pthread_create(&made->worker, nullptr, work, owned) != 0) die("no thread for a stream");
    const std::lock_guard lock(model_mutex());
    registry().insert(made);
    *stream = made.get();
    return cudaSuccess;
  });
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return api("cudaStreamDestroy", [&] {
    const auto stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    ending_workers().add(stream->worker);
    stream->close();  // as documented: returns at once, the work goes on
    const std::lock_guard lock(model_mutex());
    if (stream->capture != nullptr) stream->capture->invalidated = true;
    registry().erase(stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return api("cudaStreamSynchronize", [&] {
    const auto stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = forbid_in_capture(stream.get())) return error;
    stream->drain();
    return static_cast<cudaError_t>(stream->device.sticky.load());
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return api("cudaStreamQuery", [&] {
    const auto stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = forbid_in_capture(stream.get())) return error;
    if (const int sticky = stream->device.sticky) return static_cast<cudaError_t>(sticky);
    return stream->idle() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return api("cudaLaunchHostFunc", [&] {
    if (function == nullptr) return cudaErrorInvalidValue;
    return enqueue(stream, [=] {
      // CUDA may run all of them on one thread: if they wait for each other, they wait forever.
      static auto& one_at_a_time = *new std::mutex;
      const std::lock_guard turn(one_at_a_time);
      in_host_function = true;  // calls of the CUDA API are not permitted there
      function(data);
      in_host_function = false;
    });
  });
}
