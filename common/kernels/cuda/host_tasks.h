#pragma once
// Work of the host in the order of a GPU's stream.

#include <cuda_runtime_api.h>

#include <atomic>
#include <deque>
#include <functional>
#include <utility>

#include "common/kernels/cuda/device_state.h"

namespace lockstep::cuda {

/// The host tasks of one stream; destroyed when the stream has run dry.
class HostTasks {
 public:
  explicit HostTasks(DeviceState& state) : state_(state) {}

  /// Enqueues `body`. It is not run once the device has failed, and is destroyed after it has run:
  /// by CUDA's thread, where CUDA calls are forbidden.
  cudaError_t launch(cudaStream_t stream, std::function<void()> body);

 private:
  struct Task {
    Task(std::function<void()> body, DeviceState& state) : body(std::move(body)), state(state) {}
    std::function<void()> body;
    DeviceState& state;
    std::atomic<bool> ended{false};
  };
  static void run(void* task);

  DeviceState& state_;
  std::deque<Task> tasks_;  // in order; CUDA does not call those after an error of the GPU
};

}  // namespace lockstep::cuda
