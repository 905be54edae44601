#include "common/kernels/devices.h"

#include <cstdio>
#include <mutex>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/kernels/cpu/cpu_device.h"
#include "common/kernels/cuda/cuda.h"
#include "common/kernels/sim/sim_device.h"

namespace lockstep {

std::vector<DeviceId> default_devices(int cpu_count) {
  const cuda::Availability available = cuda::availability();
  if (available.unusable) {
    static std::once_flag said;
    std::call_once(said, [&] {
      warn(fmt::format("CPU devices are used, for the GPUs cannot be: {}", available.reason));
    });
  }
  const int gpus = available.devices;
  const auto kind = gpus > 0 ? DeviceId::Kind::cuda : DeviceId::Kind::cpu;
  std::vector<DeviceId> ids;
  for (int index = 0; index < (gpus > 0 ? gpus : cpu_count); ++index) ids.push_back({kind, index});
  return ids;
}

std::string why_no_gpu() { return cuda::availability().reason; }

std::unique_ptr<Device> open_device(const DeviceId& id, const DeviceOptions& options) {
  if (id.kind == DeviceId::Kind::cuda) return cuda::open_cuda_device(id.index, options);
  require(!options.tf32,
          "--tf32: {} has no TF32 arithmetic, GPUs have; leave it out or give --devices cuda:0",
          id.name());
  require(!options.nchw,
          "--nchw: {} has one layout, N,H,W,C, and only cuDNN is given another; leave it out or "
          "give --devices cuda:0",
          id.name());
  if (id.kind == DeviceId::Kind::sim) return sim::open_sim_device(id, options);
  return cpu::open_cpu_device(id.index, options);
}

Devices open_devices(const std::vector<DeviceId>& ids, DeviceOptions options) {
  Devices devices;
  const int shares = static_cast<int>(ids.size());
  options.neighbours = shares - 1;
  if (!ids.empty() && ids[0].kind == DeviceId::Kind::sim) options.sim_host = sim::make_host();
  for (int share = 0; share < shares; ++share) {
    if (options.bind) options.cores = share_of_cores(share, shares, options.threads);
    devices.push_back(open_device(ids[share], options));
  }
  return devices;
}

std::vector<Stream> create_streams(const Devices& devices, const std::string& name) {
  std::vector<Stream> streams;
  for (const auto& device : devices) streams.push_back(device->create_stream(name));
  return streams;
}

std::vector<Device*> pointers_to(const Devices& devices) {
  std::vector<Device*> pointers;
  for (const auto& device : devices) pointers.push_back(device.get());
  return pointers;
}

}  // namespace lockstep
