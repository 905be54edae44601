#include "common/kernels/cuda/host_tasks.h"

#include <utility>

namespace lockstep::cuda {

cudaError_t HostTasks::launch(cudaStream_t stream, std::function<void()> body) {
  while (!tasks_.empty() && tasks_.front().ended.load(std::memory_order_acquire)) {
    tasks_.pop_front();
  }
  Task& task = tasks_.emplace_back(std::move(body), state_);
  const cudaError_t status = cudaLaunchHostFunc(stream, run, &task);
  if (status != cudaSuccess) tasks_.pop_back();
  return status;
}

/// No exception may reach CUDA, which calls this.
void HostTasks::run(void* launched) {
  Task& task = *static_cast<Task*>(launched);
  try {
    if (!task.state.error()) task.body();
  } catch (...) {
    task.state.fail(std::current_exception());
  }
  task.body = nullptr;
  task.ended.store(true, std::memory_order_release);
}

}  // namespace lockstep::cuda
