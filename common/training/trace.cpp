#include "common/training/trace.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "common/core/stream_backend.h"
#include "common/io/json.h"
#include "common/system/process.h"

namespace lockstep {
namespace {

using nlohmann::json;

/// Of all streams of a device, in the order of time. No stream knows what the others do: only here
/// do their changes become one sum.
std::vector<MemoryChange> memory_changes(const Device& device) {
  std::vector<MemoryChange> all;
  for (const auto& stream : device.streams()) {
    const std::vector<MemoryChange> changes = stream->memory_changes();
    all.insert(all.end(), changes.begin(), changes.end());
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const MemoryChange& a, const MemoryChange& b) { return a.at_ns < b.at_ns; });
  return all;
}

int64_t first_moment(const std::vector<Device*>& devices) {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const Device* device : devices) {
    for (const auto& stream : device->streams()) {
      const std::vector<Span> spans = stream->timeline();
      if (!spans.empty()) first = std::min(first, spans.front().begin_ns);
    }
    const std::vector<MemoryChange> changes = memory_changes(*device);
    if (!changes.empty()) first = std::min(first, changes.front().at_ns);
  }
  return first;
}

json label(const char* what, size_t process, size_t lane, const std::string& name) {
  return {{"name", what}, {"ph", "M"}, {"pid", process}, {"tid", lane}, {"args", {{"name", name}}}};
}

/// Process and lane of a stream.
using Lanes = std::map<const StreamBackend*, std::pair<size_t, size_t>>;

json slice(const Span& span, const StreamBackend& stream, const Lanes& lanes, int64_t zero_ns) {
  json args{{"layer", span.scope == nullptr ? "" : *span.scope},
            {"queued", double(span.queued_ns - zero_ns) / 1e3}};
  if (span.sent_bytes > 0) args["sent_bytes"] = span.sent_bytes;
  for (const SpanPlace& before : span.after) {
    const auto [process, lane] = lanes.at(before.stream);
    args["after"].push_back({process, lane, before.number});
  }
  const auto [process, lane] = lanes.at(&stream);
  return {{"name", span.op},
          {"ph", "X"},
          {"pid", process},
          {"tid", lane},
          {"ts", double(span.begin_ns - zero_ns) / 1e3},
          {"dur", double(span.end_ns - span.begin_ns) / 1e3},
          {"args", std::move(args)}};
}

/// Adds a counter's values: the device's bytes in use after each change.
void add_memory(json& events, const Device& device, size_t process, int64_t zero_ns) {
  int64_t bytes = 0;
  for (const MemoryChange& change : memory_changes(device)) {
    bytes += change.bytes;
    events.push_back({{"name", "memory"},
                      {"ph", "C"},
                      {"pid", process},
                      {"tid", 0},
                      {"ts", double(change.at_ns - zero_ns) / 1e3},
                      {"args", {{"bytes", bytes}}}});
  }
}

}  // namespace

void write_trace(const std::string& path, const std::vector<Device*>& devices,
                 size_t first_process) {
  for (const Device* device : devices) {
    for (const auto& stream : device->streams()) stream->drain();  // frees come to an end, too
  }
  const int64_t zero_ns = first_moment(devices);
  Lanes lanes;
  for (size_t i = 0; i < devices.size(); ++i) {
    const auto& streams = devices[i]->streams();
    for (size_t lane = 0; lane < streams.size(); ++lane) {
      lanes[streams[lane].get()] = {first_process + i, lane};
    }
  }
  json events = json::array();
  for (size_t i = 0; i < devices.size(); ++i) {
    const size_t process = first_process + i;
    events.push_back(label("process_name", process, 0, devices[i]->name()));
    const auto& streams = devices[i]->streams();
    for (size_t lane = 0; lane < streams.size(); ++lane) {
      events.push_back(label("thread_name", process, lane, streams[lane]->name()));
      for (const Span& span : streams[lane]->timeline()) {
        events.push_back(slice(span, *streams[lane], lanes, zero_ns));
      }
    }
    add_memory(events, *devices[i], process, zero_ns);
  }
  write_json(path, {{"traceEvents", std::move(events)},
                    {"displayTimeUnit", "ms"},
                    {"otherData", {{"zero_ns", zero_ns}, {"command", own_command_line()}}}});
}

}  // namespace lockstep
