#include "common/kernels/cuda/check.h"

#include "common/core/error.h"

namespace lockstep::cuda {
namespace {

/// What a user can do about an error, or an empty string.
const char* advice(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
      return "; use a smaller batch or model, or close other programs on this GPU";
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
      return "; update the NVIDIA driver";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return "; configure the build with -Dgpu_archs= and this GPU's compute capability";
    case cudaErrorDevicesUnavailable:
      return "; another process holds this GPU alone: see nvidia-smi";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
      return "; compute-sanitizer names the kernel and the line";
    case cudaErrorLaunchTimeout:
      return "; a GPU that drives a display stops long kernels: use a smaller batch";
    case cudaErrorECCUncorrectable:
      return "; the GPU's memory is damaged: use another GPU";
    default:
      return "";
  }
}

}  // namespace

std::string describe(cudaError_t status, const char* call) {
  return fmt::format("{}: {} ({}){}", call, cudaGetErrorName(status), cudaGetErrorString(status),
                     advice(status));
}

void check(cudaError_t status, const char* call, const std::string& device) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // it is reported here, not once more by a later call
  fail<DeviceError>("{}: {}", device, describe(status, call));
}

void check(cublasStatus_t status, const char* call, const std::string& device) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail<DeviceError>("{}: {}: {} ({})", device, call, cublasGetStatusName(status),
                    cublasGetStatusString(status));
}

void check(cudnnStatus_t status, const char* call, const std::string& device) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  fail<DeviceError>("{}: {}: {}", device, call, cudnnGetErrorString(status));
}

}  // namespace lockstep::cuda
