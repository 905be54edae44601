#pragma once
// Several devices of one process.

#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "common/comm/single_process_world.h"
#include "common/core/stream_backend.h"
#include "common/kernels/devices.h"

namespace lockstep::testing {

/// "cpu:0,cpu:1" for 2.
inline std::string cpus(int count) {
  std::string list = "cpu:0";
  for (int i = 1; i < count; ++i) list += fmt::format(",cpu:{}", i);
  return list;
}

/// Devices with a stream each, and the world of their ranks.
struct Machine {
  explicit Machine(const std::string& names, DeviceOptions options = {})
      : devices(open_devices(parse_devices(names), options)),
        streams(create_streams(devices, "compute")),
        world(make_single_process_world(pointers_to(devices))) {}

  /// The operations that ran on a device under this name, in order.
  std::vector<Span> spans(size_t device, const std::string& op) const {
    std::vector<Span> found = streams[device].backend().timeline();
    std::erase_if(found, [&](const Span& span) { return span.op != op; });
    return found;
  }

  Devices devices;
  std::vector<Stream> streams;
  std::unique_ptr<SingleProcessWorld> world;
};

}  // namespace lockstep::testing
