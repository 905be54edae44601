#pragma once
// Shared by the model's libraries: streams as queues of tasks, and the frame of every API call.

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

namespace cuda_model {

using Task = std::function<void()>;
constexpr int kMaxDevices = 16;

/// Ends the process: for cases in which a GPU would hang or compute wrong numbers.
[[noreturn]] void die(const std::string& message);

/// One physical GPU.
struct Device {
  int index = 0;
  std::atomic<int> sticky{0};  // the error that ended all work on it
  size_t used = 0;             // bytes; guarded by model_mutex()
  unsigned peers = 0;          // bit per physical device; guarded by model_mutex()
};

/// The operations of one stream capture, in the order of the calls. Guarded by model_mutex().
struct Capture {
  unsigned long long id = 0;
  CUstream_st* origin = nullptr;
  std::thread::id thread;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool invalidated = false;
  std::vector<Task> nodes;
  std::vector<CUstream_st*> streams;  // origin, and those that joined through an event
};

}  // namespace cuda_model

/// A queue and the worker thread that runs it.
struct CUstream_st : std::enable_shared_from_this<CUstream_st> {
  explicit CUstream_st(cuda_model::Device& device) : device(device) {}
  void push(cuda_model::Task task);
  void close();  // the worker ends after what is queued
  void work();
  bool idle();
  void drain();  // blocks until idle

  cuda_model::Device& device;
  pthread_t worker{};
  // Capture state, guarded by model_mutex().
  std::shared_ptr<cuda_model::Capture> capture;
  size_t captured_operations = 0;  // of this stream
  size_t joined_operations = 0;    // how many of them another stream of the capture waited for

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<cuda_model::Task> queue_;
  bool busy_ = false, closed_ = false;
};

namespace cuda_model {

/// Guards the model's registries. Never held while waiting for a stream.
std::mutex& model_mutex();

/// The GPU with this number in the machine, whether the process sees it or not.
Device& physical_device(int index);
/// The GPU behind an index as the process counts them; null if there is none.
Device* visible_device(int index);
/// The GPU that the calling thread has chosen; null if there is none.
Device* current_device();
/// The error of the thread's GPU if it has one; else cudaSuccess.
cudaError_t sticky_error();

/// The stream behind a handle, or null: unknown, destroyed, or the legacy default stream.
std::shared_ptr<CUstream_st> find_stream(cudaStream_t handle);
/// All streams that exist (of one device, if given).
std::vector<std::shared_ptr<CUstream_st>> all_streams(const Device* device = nullptr);

/// Puts work into a stream, or into the graph that the stream is captured into. Work of a device
/// in error is skipped.
cudaError_t enqueue(cudaStream_t stream, Task task);
/// enqueue() for kernels: the stream must belong to the current device.
cudaError_t enqueue_kernel(cudaStream_t stream, Task task);

/// Checks a call that must not happen while a capture is open. Returns cudaSuccess, or invalidates
/// the captures and returns the code. `stream` is the one synchronised or queried, or null.
cudaError_t forbid_in_capture(CUstream_st* stream = nullptr);

/// Checks that begin every call of the CUDA runtime: driver, host function, planted fault.
cudaError_t admit(const char* function);
/// Keeps an error for cudaGetLastError.
cudaError_t remember(cudaError_t error);

template <class Body>
cudaError_t api(const char* function, Body body) {
  cudaError_t error = admit(function);
  if (error == cudaSuccess) error = body();
  return remember(error);
}

/// For cuBLAS and cuDNN: the code planted in `function`, 0 if none. An asynchronous one waits in
/// the calling thread for the next enqueue().
int planted_code(const char* function);

extern thread_local bool in_host_function;

}  // namespace cuda_model
