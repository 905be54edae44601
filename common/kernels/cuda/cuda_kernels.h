#pragma once
// The functions of cuda_kernels.cu, which nvcc compiles, for the rest of the backend.

#include <cuda_runtime_api.h>

#include <memory>

#include "common/kernels/kernels.h"

namespace lockstep::cuda {

class CudaStream;

/// The catalogue on GPUs: the shared bodies as kernels, convolution by cuDNN, products by cuBLAS.
std::unique_ptr<Kernels> make_kernels();

// Parts of operations that a stream enqueues, for Real and both numbers of 16 bits.

/// to[image, column, row] = from[image, row, column] + bias[row], or += without a bias.
template <class From, class To>
struct Transpose {
  int64_t images, rows, columns;
  const From* from;
  To* to;
  const Real* bias = nullptr;
  bool add = false;
};
template <class From, class To>
void transpose(CudaStream&, const Transpose<From, To>&);

/// y[i] += x[i] for i in [0, n)
template <class T>
void add_to(CudaStream&, int64_t n, const T* x, Real* y);

/// The many pixels of images [images, many_height, many_width, channels], and the few of them whose
/// row and column are multiples of `stride`.
struct PixelGrid {
  int64_t images, many_height, many_width, few_height, few_width, channels, stride;
};
/// Copies the few pixels out of the many.
template <class T>
void take_pixels(CudaStream&, const PixelGrid&, const T* many, T* few);
/// Copies the few pixels back, and sets all others to zero.
template <class T>
void spread_pixels(CudaStream&, const PixelGrid&, const T* few, T* many);

/// cudaErrorNoKernelImageForDevice if this build has no code for the current GPU.
cudaError_t kernels_fit_current_device();

}  // namespace lockstep::cuda
