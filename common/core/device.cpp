#include "common/core/device.h"

#include <algorithm>
#include <utility>

#include "common/core/error.h"
#include "common/core/parse.h"
#include "common/core/stream_backend.h"

namespace lockstep {
namespace {

constexpr int64_t kMostDevices = 1024;
constexpr std::string_view kDefaultProfile = "default";

DeviceId parse_device(std::string_view text) {
  const size_t colon = text.find(':');
  const std::string_view kind = text.substr(0, colon);
  const std::string_view index = colon == std::string_view::npos ? "0" : text.substr(colon + 1);
  const auto number = read_whole(index, 0, kMostDevices - 1);
  require((kind == "cpu" || kind == "cuda") && number.has_value(),
          "--devices: '{}' is not a device; write cpu:N or cuda:N with N from 0 to {}, "
          "separated by commas, or sim:N for N simulated ones",
          text, kMostDevices - 1);
  return {kind == "cuda" ? DeviceId::Kind::cuda : DeviceId::Kind::cpu, int(*number)};
}

/// What is behind "sim:": "2", "h100", "h100x8", or a path with or without a number.
void add_simulated(std::string_view text, std::vector<DeviceId>& ids) {
  std::string_view profile = text, count = "1";
  if (read_whole(text, 0, INT64_MAX)) {
    profile = kDefaultProfile;
    count = text;
  } else if (const size_t x = text.rfind('x');
             x != text.npos && read_whole(text.substr(x + 1), 0, INT64_MAX)) {
    profile = text.substr(0, x);
    count = text.substr(x + 1);
  }
  const auto number = read_whole(count, 1, kMostDevices);
  require(number.has_value() && !profile.empty(),
          "--devices: 'sim:{}': expected sim:N or sim:PROFILExN with N from 1 to {}, for instance "
          "sim:2 or sim:h100x8",
          text, kMostDevices);
  for (int64_t i = 0; i < *number; ++i) {
    ids.push_back({DeviceId::Kind::sim, static_cast<int>(ids.size()), std::string(profile)});
  }
}

}  // namespace

std::string DeviceId::name() const {
  if (kind == Kind::sim && profile == kDefaultProfile) return fmt::format("sim:{}", index);
  if (kind == Kind::sim) return fmt::format("sim:{}:{}", profile, index);
  return fmt::format("{}:{}", kind == Kind::cuda ? "cuda" : "cpu", index);
}

std::vector<DeviceId> parse_devices(std::string_view list) {
  require(!list.empty(), "--devices: the list is empty; write for instance cpu:0 or cuda:0,cuda:1");
  std::vector<DeviceId> ids;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t comma = std::min(list.find(',', begin), list.size());
    const std::string_view text = list.substr(begin, comma - begin);
    if (text.starts_with("sim:")) {
      add_simulated(text.substr(4), ids);
    } else {
      ids.push_back(parse_device(text));
    }
    require(ids.back().kind == ids.front().kind,
            "--devices: {} and {} are of different kinds; all devices of a run are of one kind",
            ids.front().name(), ids.back().name());
    begin = comma + 1;
  }
  for (DeviceId& id : ids) {
    if (id.kind == DeviceId::Kind::sim) id.beside = static_cast<int>(ids.size());
  }
  return ids;
}

void MemoryCounter::add(int64_t bytes) {
  const int64_t now = current_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t peak = peak_.load(std::memory_order_relaxed);
  while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

Device::Device(DeviceId id, DeviceOptions options) : id_(id), options_(std::move(options)) {}
Device::~Device() = default;

void Device::close_streams() { streams_.clear(); }

void Device::drain() const noexcept {
  for (const auto& stream : streams_) stream->drain();
}

Stream Device::create_stream(std::string name) {
  streams_.push_back(make_stream(std::move(name)));
  return Stream(*streams_.back());
}

}  // namespace lockstep
