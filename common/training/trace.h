#pragma once
// The timeline of a run, for chrome://tracing or ui.perfetto.dev.

#include <string>
#include <vector>

#include "common/core/device.h"

namespace lockstep {

/// Writes what the devices' streams executed (see DeviceOptions::trace) as a Chrome trace: one
/// process per device, numbered from `first_process` on, one lane per stream, and one slice per
/// operation, with its name and, in its arguments, the layer and when the host enqueued it
/// ("queued"). Each process has a counter, "memory": the device's bytes in use. It changes when the
/// stream comes to an allocation or a free. Slices of simulated streams have two more arguments:
/// the bytes that they send to other devices and ranks ("sent_bytes"), and what they waited for on
/// other streams ("after": [process, lane, number of the slice on its lane]). Waits for the
/// streams. Format: "Trace Event Format", complete events ("ph": "X") and counters ("C"),
/// microseconds since "zero_ns" of its "otherData": that moment on this host's steady clock, so
/// that the traces of several processes can be shown side by side. "otherData" also has this
/// program's command line ("command").
void write_trace(const std::string& path, const std::vector<Device*>& devices,
                 size_t first_process = 0);

}  // namespace lockstep
