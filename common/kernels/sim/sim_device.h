#pragma once
// A simulated device: it enqueues, waits and allocates as others do, in a time of its own, and
// computes nothing. So the work of a program can be drawn and timed for machines that are not
// there.

#include <memory>

#include "common/core/device.h"

namespace lockstep::sim {

/// Opens sim:`index` with the rates of the profile that `id` names. Devices that are given the same
/// DeviceOptions::sim_host have one host, and can copy to each other.
std::unique_ptr<Device> open_sim_device(const DeviceId& id, const DeviceOptions& options);

/// Makes a host for several simulated devices.
std::shared_ptr<SimHost> make_host();

}  // namespace lockstep::sim
