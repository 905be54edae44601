#pragma once
// Whether the CPU devices of a run got the cores that they computed on.

#include <optional>
#include <string>
#include <vector>

#include "common/core/device.h"
#include "common/system/process.h"

namespace lockstep {

/// The share of a thread's time, 0 to 1, in which it was ready to go on but something else had its
/// core. `own_seconds` do not count: in this time other threads of the same process computed, and
/// the thread may have waited for them. 0 if there was too little time to say.
double share_without_core(const ThreadTimes& times, double own_seconds);

/// From this share without a core on, timings are spoilt. (On a quiet machine a device waits for up
/// to 5 % of its time.)
constexpr double kNoticedWithoutCore = 0.1;

/// Adds up the time in which threads of CPU devices wait for cores, from start() to stop().
class CoreWatch {
 public:
  explicit CoreWatch(std::vector<Device*> devices);

  void start();
  void stop();

  /// By device: share_without_core() of its busiest stream; 0 for GPUs.
  std::vector<double> shares_without_core() const;

 private:
  /// The times of all streams of a device, in their order.
  using StreamTimes = std::vector<ThreadTimes>;
  std::vector<StreamTimes> times_now() const;

  std::vector<Device*> devices_;
  std::vector<StreamTimes> begin_{}, sums_{};  // by device
  double process_begin_ = 0, process_sum_ = 0;
};

/// "Ready to compute, but without a core: cpu:1 for 31 % of its time. ...", about the devices for
/// which that share is large enough to spoil timings; empty if there is none.
std::string text_of_missing_cores(const std::vector<std::string>& devices,
                                  const std::vector<double>& shares);

}  // namespace lockstep
