#pragma once
// What the streams of one GPU share besides the GPU.

#include <exception>
#include <functional>
#include <map>
#include <mutex>

namespace lockstep::cuda {

/// Host tasks and libraries can fail where the GPU does not notice. What it was given is not taken
/// back then: streams that wait for the failed work run on with whatever that left. So it concerns
/// all streams of the device, as the error of a kernel does, and each of them reports it.
class DeviceState {
 public:
  /// The first failure, or null.
  std::exception_ptr error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  void fail(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }

  /// `look` runs again and again while a host thread is blocked until a stream of the device gets
  /// somewhere: it may end what the stream waits for. Null: `owner` looks no more.
  void watch(const void* owner, std::function<void()> look) {
    const std::lock_guard lock(mutex_);
    watchers_.erase(owner);
    if (look) watchers_.emplace(owner, std::move(look));
  }
  /// True if anybody does.
  bool look() const {
    std::map<const void*, std::function<void()>> watchers;
    {
      const std::lock_guard lock(mutex_);
      watchers = watchers_;
    }
    for (const auto& watcher : watchers) watcher.second();
    return !watchers.empty();
  }

 private:
  mutable std::mutex mutex_;  // of CUDA's thread and of all that ask
  std::exception_ptr error_;
  std::map<const void*, std::function<void()>> watchers_;
};

}  // namespace lockstep::cuda
