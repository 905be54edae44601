#pragma once
// Several devices of one process.

#include <fmt/format.h>

#include <string>
#include <vector>

#include "common/core/stream_backend.h"
#include "common/kernels/devices.h"

namespace lockstep::testing {

/// "cpu:0,cpu:1" for 2.
inline std::string cpus(int count) {
  std::string list = "cpu:0";
  for (int i = 1; i < count; ++i) list += fmt::format(",cpu:{}", i);
  return list;
}

/// Devices with a stream each.
struct Machine {
  explicit Machine(const std::string& names, DeviceOptions options = {})
      : devices(open_devices(parse_devices(names), options)),
        streams(create_streams(devices, "compute")) {}

  /// The operations that ran on a device under this name, in order.
  std::vector<Span> spans(size_t device, const std::string& op) const {
    std::vector<Span> found = streams[device].backend().timeline();
    std::erase_if(found, [&](const Span& span) { return span.op != op; });
    return found;
  }

  Devices devices;
  std::vector<Stream> streams;
};

}  // namespace lockstep::testing
