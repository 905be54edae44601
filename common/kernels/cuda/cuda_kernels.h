#pragma once
// What cuda_kernels.cu, which nvcc compiles, gives to the rest of the backend.

#include <cuda_runtime_api.h>

#include <memory>

#include "common/kernels/kernels.h"

namespace lockstep::cuda {

/// The catalogue on GPUs: the shared bodies as kernels, convolution by cuDNN, products by cuBLAS.
std::unique_ptr<Kernels> make_kernels();

/// cudaErrorNoKernelImageForDevice if this build has no code for the current GPU.
cudaError_t kernels_fit_current_device();

}  // namespace lockstep::cuda
