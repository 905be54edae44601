#pragma once
// A CPU device: virtual, with its own compute threads, streams and memory counter.

#include <memory>

#include "common/core/device.h"

namespace lockstep::cpu {

/// `best` is oneDNN where this build has it; `reference` is for tests, which compare the two.
enum class EngineKind { best, reference };

/// Opens cpu:`index`.
std::unique_ptr<Device> open_cpu_device(int index, const DeviceOptions& options,
                                        EngineKind engine = EngineKind::best);

}  // namespace lockstep::cpu
