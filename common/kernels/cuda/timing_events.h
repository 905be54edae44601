#pragma once
// Events that can give their time, used again and again.

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/kernels/cuda/check.h"

namespace lockstep::cuda {

/// The events with times of one stream. To make one is a call of the driver, so one that nobody can
/// ask for its time any more is recorded anew; no other one is. May be used by several threads.
class TimingEvents : public std::enable_shared_from_this<TimingEvents> {
  struct GiveBack {
    std::shared_ptr<TimingEvents> pool;  // an event may outlive its stream
    void operator()(cudaEvent_t event) const noexcept { pool->give_back(event); }
  };

 public:
  /// Whoever owns it may ask for its time, whatever the stream records later.
  using Owned = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, GiveBack>;

  explicit TimingEvents(std::string device) : device_(std::move(device)) {}

  /// An event to record in that stream, whose GPU must be current.
  Owned take();

 private:
  void give_back(cudaEvent_t event) noexcept;

  const std::string device_;
  std::mutex mutex_;
  size_t made_ = 0;
  std::vector<EventHandle> unused_;
};

}  // namespace lockstep::cuda
