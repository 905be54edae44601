#include "common/training/core_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "common/core/stream_backend.h"
#include "common/core/text.h"

namespace lockstep {
namespace {

constexpr double kLeastSeconds = 0.2;  // of less the system's clocks say too little

/// The device's compute stream: copies and messages take less.
ThreadTimes busiest(const std::vector<ThreadTimes>& streams) {
  return std::ranges::max(streams, {}, &ThreadTimes::computed);
}

}  // namespace

double share_without_core(const ThreadTimes& times, double own_seconds) {
  const double wanted = times.computed + times.queued;
  return wanted < kLeastSeconds ? 0 : std::max(0.0, times.queued - own_seconds) / wanted;
}

CoreWatch::CoreWatch(std::vector<Device*> devices)
    : devices_(std::move(devices)), sums_(devices_.size()) {}

std::vector<CoreWatch::StreamTimes> CoreWatch::times_now() const {
  std::vector<StreamTimes> all;
  for (const Device* device : devices_) {
    all.emplace_back();
    for (const auto& stream : device->streams()) {
      all.back().push_back(thread_times(stream->thread()).value_or(ThreadTimes{}));
    }
  }
  return all;
}

void CoreWatch::start() {
  begin_ = times_now();
  process_begin_ = process_seconds();
}

void CoreWatch::stop() {
  const std::vector<StreamTimes> end = times_now();
  for (size_t d = 0; d < end.size(); ++d) {
    sums_[d].resize(end[d].size());
    for (size_t s = 0; s < end[d].size(); ++s) {
      const ThreadTimes before = s < begin_[d].size() ? begin_[d][s] : ThreadTimes{};
      sums_[d][s].computed += end[d][s].computed - before.computed;
      sums_[d][s].queued += end[d][s].queued - before.queued;
    }
  }
  process_sum_ += process_seconds() - process_begin_;
}

std::vector<double> CoreWatch::shares_without_core() const {
  // What is not computing: a device's other threads compute about as long as its stream's.
  const double threads = devices_.front()->options().threads;
  double own_seconds = process_sum_;
  for (const StreamTimes& streams : sums_) {
    if (!streams.empty()) own_seconds -= threads * busiest(streams).computed;
  }
  own_seconds = std::max(0.0, own_seconds);
  std::vector<double> shares;
  for (const StreamTimes& streams : sums_) {
    shares.push_back(streams.empty() ? 0 : share_without_core(busiest(streams), own_seconds));
  }
  return shares;
}

std::string text_of_missing_cores(const std::vector<std::string>& devices,
                                  const std::vector<double>& shares) {
  std::vector<std::string> found;
  for (size_t d = 0; d < devices.size(); ++d) {
    if (shares[d] < kNoticedWithoutCore) continue;
    found.push_back(fmt::format("{} for {:.0f} %", devices[d], 100 * shares[d]));
  }
  if (found.empty()) return "";
  return fmt::format(
      "Ready to compute, but without a core: {} of its time. Something else runs on this machine, "
      "or there are more devices than cores; these timings are not those of a quiet machine. "
      "A device that waits for another one without a core counts this time as waiting: as a "
      "pipeline's bubble, or as communication.",
      listed(found));
}

}  // namespace lockstep
