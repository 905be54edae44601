#pragma once
// Opening devices by name.

#include <memory>
#include <string>
#include <vector>

#include "common/core/device.h"

namespace lockstep {

/// The devices that a run uses when none are named: all GPUs if there are any, else `cpu_count`
/// CPU devices.
std::vector<DeviceId> default_devices(int cpu_count);

/// Why default_devices() gives no GPUs, for the first line of a run; empty if it does.
std::string why_no_gpu();

/// Opens a device. Throws EnvironmentError if this machine or build has no such device.
std::unique_ptr<Device> open_device(const DeviceId& id, const DeviceOptions& options);

/// Several devices; the same one may be named twice and is then opened twice.
using Devices = std::vector<std::unique_ptr<Device>>;
/// If `options.bind` is true and there are enough cores for all threads, each CPU device gets an
/// equal part of them. The system does not move a thread to where another device computes.
Devices open_devices(const std::vector<DeviceId>& ids, DeviceOptions options);
/// One stream of each device, all called `name`.
std::vector<Stream> create_streams(const Devices& devices, const std::string& name);
std::vector<Device*> pointers_to(const Devices& devices);

}  // namespace lockstep
