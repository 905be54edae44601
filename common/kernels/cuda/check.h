#pragma once
// Return codes of the CUDA libraries as exceptions, and owners for what they create.

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>

#include <memory>
#include <string>
#include <type_traits>

namespace lockstep::cuda {

/// "cudaStreamCreate: cudaErrorLaunchTimeout (the launch timed out and was terminated); ..." with
/// what to do about it.
std::string describe(cudaError_t status, const char* call);

/// Throws DeviceError, "cuda:0: " and describe(), unless the call succeeded. `device` is the name
/// that the text begins with.
void check(cudaError_t status, const char* call, const std::string& device);
void check(cublasStatus_t status, const char* call, const std::string& device);
void check(cudnnStatus_t status, const char* call, const std::string& device);

/// Calls `destroy` on the owned object; the returned status no longer matters.
template <auto destroy>
struct Destroyer {
  template <class Pointer>
  void operator()(Pointer object) const {
    destroy(object);
  }
};

/// Owns an object of a CUDA library, of the opaque pointer type `Pointer`.
template <class Pointer, auto destroy>
using Handle = std::unique_ptr<std::remove_pointer_t<Pointer>, Destroyer<destroy>>;

using StreamHandle = Handle<cudaStream_t, cudaStreamDestroy>;
using EventHandle = Handle<cudaEvent_t, cudaEventDestroy>;
using PoolHandle = Handle<cudaMemPool_t, cudaMemPoolDestroy>;
using GraphHandle = Handle<cudaGraph_t, cudaGraphDestroy>;
using GraphExecHandle = Handle<cudaGraphExec_t, cudaGraphExecDestroy>;
using CublasHandle = Handle<cublasHandle_t, cublasDestroy>;
using CudnnHandle = Handle<cudnnHandle_t, cudnnDestroy>;
using TensorDescriptor = Handle<cudnnTensorDescriptor_t, cudnnDestroyTensorDescriptor>;
using FilterDescriptor = Handle<cudnnFilterDescriptor_t, cudnnDestroyFilterDescriptor>;
using ConvolutionDescriptor =
    Handle<cudnnConvolutionDescriptor_t, cudnnDestroyConvolutionDescriptor>;
using ActivationDescriptor = Handle<cudnnActivationDescriptor_t, cudnnDestroyActivationDescriptor>;

}  // namespace lockstep::cuda
