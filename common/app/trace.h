#pragma once
// The timeline of a run, for chrome://tracing or ui.perfetto.dev.

#include <string>
#include <vector>

#include "common/core/device.h"

namespace lockstep {

/// Writes what the devices' streams executed (see DeviceOptions::trace) as a Chrome trace: one
/// process per device, numbered from `first_process` on, one lane per stream, one slice per
/// operation named after it, the layer in its arguments. Call it when all streams are synchronized.
/// Format: "Trace Event Format", complete events ("ph": "X"), microseconds since "zero_ns" of its
/// "otherData": that moment on this host's steady clock, so that the traces of several processes
/// can be laid beside each other.
void write_trace(const std::string& path, const std::vector<Device*>& devices,
                 size_t first_process = 0);

}  // namespace lockstep
