#include "common/core/device.h"

#include <algorithm>
#include <utility>

#include "common/core/error.h"
#include "common/core/parse.h"
#include "common/core/stream_backend.h"

namespace lockstep {
namespace {

DeviceId parse_device(std::string_view text) {
  const size_t colon = text.find(':');
  const std::string_view kind = text.substr(0, colon);
  const std::string_view index = colon == std::string_view::npos ? "0" : text.substr(colon + 1);
  const auto number = read_whole(index, 0, 1023);
  require((kind == "cpu" || kind == "cuda") && number.has_value(),
          "--devices: '{}' is not a device; write cpu:N or cuda:N with N from 0 to 1023, "
          "separated by commas",
          text);
  return {kind == "cuda" ? DeviceId::Kind::cuda : DeviceId::Kind::cpu, int(*number)};
}

}  // namespace

std::string DeviceId::name() const {
  return fmt::format("{}:{}", kind == Kind::cuda ? "cuda" : "cpu", index);
}

std::vector<DeviceId> parse_devices(std::string_view list) {
  require(!list.empty(), "--devices: the list is empty; write for instance cpu:0 or cuda:0,cuda:1");
  std::vector<DeviceId> ids;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t comma = std::min(list.find(',', begin), list.size());
    ids.push_back(parse_device(list.substr(begin, comma - begin)));
    require(ids.back().kind == ids.front().kind,
            "--devices: {} and {} are of different kinds; all devices of a run are of one kind",
            ids.front().name(), ids.back().name());
    begin = comma + 1;
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
