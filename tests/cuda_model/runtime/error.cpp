// Names of error codes, and the frame of an API call.

#include <utility>

#include "runtime/environment.h"
#include "runtime/model.h"

namespace cuda_model {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int pending_async_fault = 0;

struct ErrorText {
  cudaError_t code;
  const char* name;
  const char* text;
};
#define TEXT(name, text) \
  ErrorText { name, #name, text }
constexpr ErrorText kTexts[] = {
    TEXT(cudaSuccess, "no error"),
    TEXT(cudaErrorInvalidValue, "invalid argument"),
    TEXT(cudaErrorMemoryAllocation, "out of memory"),
    TEXT(cudaErrorInitializationError, "initialization error"),
    TEXT(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    TEXT(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    TEXT(cudaErrorStubLibrary, "CUDA driver is a stub library"),
    TEXT(cudaErrorInsufficientDriver,
         "CUDA driver version is insufficient for CUDA runtime version"),
    TEXT(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable"),
    TEXT(cudaErrorInvalidDeviceFunction, "invalid device function"),
    TEXT(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    TEXT(cudaErrorInvalidDevice, "invalid device ordinal"),
    TEXT(cudaErrorNoKernelImageForDevice,
         "no kernel image is available for execution on the device"),
    TEXT(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered"),
    TEXT(cudaErrorPeerAccessUnsupported, "peer access is not supported between these two devices"),
    TEXT(cudaErrorUnsupportedPtxVersion,
         "the provided PTX was compiled with an unsupported toolchain."),
    TEXT(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    TEXT(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    TEXT(cudaErrorNotReady, "device not ready"),
    TEXT(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    TEXT(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    TEXT(cudaErrorLaunchTimeout, "the launch timed out and was terminated"),
    TEXT(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    TEXT(cudaErrorPeerAccessNotEnabled, "peer access has not been enabled"),
    TEXT(cudaErrorAssert, "device-side assert triggered"),
    TEXT(cudaErrorMisalignedAddress, "misaligned address"),
    TEXT(cudaErrorLaunchFailure, "unspecified launch failure"),
    TEXT(cudaErrorNotPermitted, "operation not permitted"),
    TEXT(cudaErrorNotSupported, "operation not supported"),
    TEXT(cudaErrorSystemNotReady, "system not yet initialized"),
    TEXT(cudaErrorSystemDriverMismatch,
         "system has unsupported display driver / cuda driver combination"),
    TEXT(cudaErrorCompatNotSupportedOnDevice,
         "forward compatibility was attempted on non supported HW"),
    TEXT(cudaErrorMpsConnectionFailed, "MPS client failed to connect to the MPS control daemon"),
    TEXT(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    TEXT(cudaErrorStreamCaptureInvalidated,
         "operation failed due to a previous error during capture"),
    TEXT(cudaErrorStreamCaptureMerge,
         "operation would result in a merge of separate capture sequences"),
    TEXT(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    TEXT(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    TEXT(cudaErrorStreamCaptureIsolation,
         "dependency created on uncaptured work in another stream"),
    TEXT(cudaErrorStreamCaptureImplicit,
         "operation would make the legacy stream depend on a capturing blocking stream"),
    TEXT(cudaErrorCapturedEvent,
         "operation not permitted on an event last recorded in a capturing stream"),
    TEXT(cudaErrorStreamCaptureWrongThread,
         "attempt to terminate a thread-local capture sequence from another thread"),
    TEXT(cudaErrorUnknown, "unknown error"),
};
#undef TEXT

const ErrorText* find_text(cudaError_t code) {
  for (const ErrorText& text : kTexts) {
    if (text.code == code) return &text;
  }
  return nullptr;
}

}  // namespace

thread_local bool in_host_function = false;

int planted_code(const char* function) {
  const Fault fault = take_fault(function);
  if (!fault.async) return fault.code;
  pending_async_fault = fault.code;
  return 0;
}

int take_pending_async_fault() { return std::exchange(pending_async_fault, 0); }

cudaError_t admit(const char* function) {
  if (in_host_function) return cudaErrorNotPermitted;
  if (integer_variable("CUDA_MODEL_DRIVER", kRuntimeVersion) < kRuntimeVersion) {
    return cudaErrorInsufficientDriver;
  }
  return static_cast<cudaError_t>(planted_code(function));
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace cuda_model

using namespace cuda_model;

const char* cudaGetErrorName(cudaError_t error) {
  const ErrorText* text = find_text(error);
  return text == nullptr ? "unrecognized error code" : text->name;
}
const char* cudaGetErrorString(cudaError_t error) {
  const ErrorText* text = find_text(error);
  return text == nullptr ? "unrecognized error code" : text->text;
}
cudaError_t cudaPeekAtLastError() {
  const cudaError_t sticky = sticky_error();
  return sticky != cudaSuccess ? sticky : last_error;
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  last_error = cudaSuccess;
  return error;
}
