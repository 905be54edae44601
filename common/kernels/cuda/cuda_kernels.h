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

/// Pixels of images [images, many_height, many_width, channels], and those of them whose row and
/// column are multiples of `stride`.
struct PixelGrid {
  int64_t images, many_height, many_width, few_height, few_width, channels, stride;
};
/// Part of an operation: copies those pixels.
void take_pixels(CudaStream&, const PixelGrid&, const Real* many, Real* few);
/// Part of an operation: copies them back, and sets all others to zero.
void spread_pixels(CudaStream&, const PixelGrid&, const Real* few, Real* many);

/// cudaErrorNoKernelImageForDevice if this build has no code for the current GPU.
cudaError_t kernels_fit_current_device();

}  // namespace lockstep::cuda
