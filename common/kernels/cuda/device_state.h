#pragma once
// What the streams of one GPU share, apart from the GPU itself.

#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace lockstep::cuda {

/// Host tasks and libraries can fail without the GPU noticing. Work already given to the GPU is not
/// taken back then: streams that wait for the failed work continue with whatever it left. So a
/// failure concerns all streams of the device, as the error of a kernel does, and each stream
/// reports it.
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

  /// `look` runs again and again while a host thread is blocked until a stream of the device makes
  /// progress: `look` may end what the stream waits for. Null: `owner` looks no more.
  void watch(const void* owner, std::function<void()> look) {
    const std::lock_guard lock(mutex_);
    watchers_.erase(owner);
    if (look) watchers_.emplace(owner, std::move(look));
  }
  /// Calls every `look`; true if there is one.
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
  mutable std::mutex mutex_;  // between CUDA's thread and all that ask
  std::exception_ptr error_;
  std::map<const void*, std::function<void()>> watchers_;
};

}  // namespace lockstep::cuda
