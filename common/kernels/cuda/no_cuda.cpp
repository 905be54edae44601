// The CUDA backend in a build without CUDA.

#include "common/core/error.h"
#include "common/kernels/cuda/cuda.h"

namespace lockstep::cuda {
namespace {
constexpr const char* kReason = "this build has no CUDA backend";
}

Availability availability() { return {.reason = kReason}; }

std::unique_ptr<Device> open_cuda_device(int index, const DeviceOptions&) {
  fail<EnvironmentError>("cuda:{}: {}; use --devices cpu:0", index, kReason);
}

}  // namespace lockstep::cuda
