#pragma once
// What cuda_kernels.cu, which nvcc compiles, gives to the rest of the backend.

#include <cuda_runtime_api.h>

#include <memory>

#include "common/kernels/kernels.h"

namespace lockstep::cuda {

class CudaStream;

/// The catalogue on GPUs: the shared bodies as kernels, convolution by cuDNN, products by cuBLAS.
std::unique_ptr<Kernels> make_kernels();

/// Part of an operation that a stream enqueues:
/// to[image, column, row] = from[image, row, column] + bias[row], or += without a bias.
struct Transpose {
  int64_t images, rows, columns;
  const Real* from;
  Real* to;
  const Real* bias = nullptr;
  bool add = false;
};
void transpose(CudaStream&, const Transpose&);

/// cudaErrorNoKernelImageForDevice if this build has no code for the current GPU.
cudaError_t kernels_fit_current_device();

}  // namespace lockstep::cuda
