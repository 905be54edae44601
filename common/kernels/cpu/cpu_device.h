#pragma once
// A CPU device: virtual, with its own compute threads, streams and memory counter.

#include <memory>

#include "common/core/device.h"

namespace lockstep::cpu {

enum class EngineKind { best, reference };

/// Opens cpu:`index`. `best` is oneDNN where this build has it.
std::unique_ptr<Device> open_cpu_device(int index, const DeviceOptions& options,
                                        EngineKind engine = EngineKind::best);

}  // namespace lockstep::cpu
