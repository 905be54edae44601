#include "common/kernels/cuda/check.h"

#include "common/core/error.h"

namespace lockstep::cuda {
namespace {

/// For errors that a user cannot foresee.
constexpr const char* kAdvice =
    "; if it comes again, compute-sanitizer may name the cause; --devices cpu:0 works without the "
    "GPU";

/// What a user can do about an error.
const char* advice(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
      return "; use a smaller batch or model, or close other programs on this GPU";
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
      return "; update the NVIDIA driver";
    case cudaErrorSystemNotReady:
      return "; several GPUs on a switch need nvidia-fabricmanager, running and of the driver's "
             "version";
    case cudaErrorCompatNotSupportedOnDevice:
      return "; take .../cuda/compat out of the library path, or update the NVIDIA driver";
    case cudaErrorStubLibrary:
      return "; take .../stubs out of LD_LIBRARY_PATH";
    case cudaErrorMpsConnectionFailed:
      return "; start MPS's control daemon, or unset CUDA_MPS_PIPE_DIRECTORY";
    case cudaErrorInitializationError:
    case cudaErrorUnknown:
      return "; see nvidia-smi and dmesg: is the module nvidia_uvm loaded?";
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
      return kAdvice;
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

namespace {

/// A library that meets an error of an earlier kernel reports it as its own: this names the real
/// source.
std::string earlier_error() {
  const cudaError_t cause = cudaGetLastError();
  return cause == cudaSuccess ? std::string(kAdvice)
                              : " after " + describe(cause, "an earlier operation");
}

}  // namespace

void check(cublasStatus_t status, const char* call, const std::string& device) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail<DeviceError>("{}: {}: {} ({}){}", device, call, cublasGetStatusName(status),
                    cublasGetStatusString(status), earlier_error());
}

void check(cudnnStatus_t status, const char* call, const std::string& device) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  fail<DeviceError>("{}: {}: {}{}", device, call, cudnnGetErrorString(status), earlier_error());
}

}  // namespace lockstep::cuda
