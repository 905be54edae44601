#pragma once
// The timeline of a run, for chrome://tracing or ui.perfetto.dev.

#include <string>
#include <vector>

#include "common/core/device.h"

namespace lockstep {

/// Writes what the devices' streams executed (see DeviceOptions::trace) as a Chrome trace. Each
/// device is a process, numbered from `first_process` on. Each stream is a lane. Each operation is
/// a slice with its name. Its arguments are the layer and when the host enqueued it ("queued").
/// Each process has a counter, "memory": the device's bytes in use. It changes when the stream
/// comes to an allocation or a free. Slices of simulated streams have two more arguments.
/// "sent_bytes" are the bytes that they send to other devices and ranks. "after" is what they
/// waited for on other streams: [process, lane, number of the slice on its lane]. Waits for the
/// streams. The format is "Trace Event Format", with complete events ("ph": "X") and counters
/// ("C"). Times are microseconds since "zero_ns" of its "otherData", a moment on this host's steady
/// clock. So the traces of several processes can be shown side by side. "otherData" also has this
/// program's command line ("command").
void write_trace(const std::string& path, const std::vector<Device*>& devices,
                 size_t first_process = 0);

}  // namespace lockstep
