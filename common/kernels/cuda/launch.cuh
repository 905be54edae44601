#pragma once
// How the bodies run on a GPU: a kernel whose threads stride over the elements. The launchers have
// the names and arguments of cpu/launch.h.

// Before the bodies are included: nvcc compiles their functions for both processors.
#define LOCKSTEP_BODY __host__ __device__ __forceinline__
#define LOCKSTEP_UNROLL _Pragma("unroll")

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/core/tensor.h"
#include "common/kernels/bodies/portable.h"
#include "common/kernels/cuda/cuda_stream.h"
#include "common/kernels/cuda/divisor.cuh"

namespace lockstep::cuda {

constexpr int kBlock = 256;     // threads
constexpr int kBlocksEach = 8;  // per multiprocessor: all that fit side by side

/// Threads for n elements, in blocks; more elements than threads are taken in strides.
inline unsigned blocks_for(int64_t n, const CudaStream& stream) {
  const int64_t most = int64_t{stream.multiprocessors()} * kBlocksEach;
  return static_cast<unsigned>(std::clamp<int64_t>((n + kBlock - 1) / kBlock, 1, most));
}

/// Calls f(n as uint32_t) where n fits, else f(n): 32-bit division takes a fraction of the time.
template <class F>
void with_narrow_index(int64_t n, F f) {
  if (n < int64_t{std::numeric_limits<int32_t>::max()}) {
    f(static_cast<uint32_t>(n));
  } else {
    f(n);
  }
}

/// visit(i) for i in [0, n), over all threads of the grid.
template <class Index, class Visit>
__device__ __forceinline__ void grid_stride(Index n, Visit visit) {
  const Index stride = Index(gridDim.x) * blockDim.x;
  for (Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) visit(i);
}

/// use(load(i)) for i = first, first + step, ... below end, in this order. Memory answers after
/// hundreds of cycles: kAhead values are loaded before the first of them is used.
template <class Load, class Use>
__device__ __forceinline__ void load_ahead(int64_t first, int64_t end, int64_t step, Load load,
                                           Use use) {
  constexpr int kAhead = 4;
  int64_t i = first;
  for (; i + (kAhead - 1) * step < end; i += kAhead * step) {
    decltype(load(i)) values[kAhead];
    LOCKSTEP_UNROLL
    for (int k = 0; k < kAhead; ++k) values[k] = load(i + k * step);
    LOCKSTEP_UNROLL
    for (int k = 0; k < kAhead; ++k) use(values[k]);
  }
#pragma unroll 1
  for (; i < end; i += step) use(load(i));
}

template <class Index, class Body>
__global__ void __launch_bounds__(kBlock) each_kernel(Index n, Body body) {
  if constexpr (requires { body.enabled(); }) {
    if (!body.enabled()) return;
  }
  const auto run = bodies::prepared(body);
  grid_stride(n, [&](Index i) { run(i); });
}

template <class Index, class Body>
__global__ void __launch_bounds__(kBlock)
    each_row_kernel(Index n, Divisor<Index> features, Body body) {
  grid_stride(n, [&](Index i) {
    const Index row = features.quotient(i);
    body(row, i - row * features.divisor);
  });
}

template <class Index, class Body>
__global__ void __launch_bounds__(kBlock)
    each_pixel_kernel(Index n, Divisor<Index> height, Divisor<Index> width, Divisor<Index> channels,
                      Body body) {
  grid_stride(n, [&](Index i) {
    const Index pixel = channels.quotient(i), row = width.quotient(pixel);
    const Index image = height.quotient(row);
    body(image, row - image * height.divisor, pixel - row * width.divisor,
         i - pixel * channels.divisor);
  });
}

/// The launchers of element-wise bodies.
struct ElementLaunch {
  /// body(i) for i in [0, n). A body that has enabled() is asked when the operation runs; one that
  /// has prepared() is prepared then, by each thread.
  template <class Body>
  static void for_each(Stream stream, const char* op, int64_t n, Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t raw) {
      with_narrow_index(
          n, [&](auto count) { each_kernel<<<blocks_for(n, s), kBlock, 0, raw>>>(count, body); });
    });
  }

  /// body(row, feature) for every element of [rows, features].
  template <class Body>
  static void for_each_row(Stream stream, const char* op, int64_t rows, int64_t features,
                           Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t raw) {
      with_narrow_index(rows * features, [&](auto count) {
        using Index = decltype(count);
        each_row_kernel<<<blocks_for(rows * features, s), kBlock, 0, raw>>>(
            count, Divisor<Index>{Index(features)}, body);
      });
    });
  }

  /// body(n, h, w, c) for every element of an NHWC shape.
  template <class Body>
  static void for_each_pixel(Stream stream, const char* op, const Shape& shape, Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t raw) {
      with_narrow_index(shape.elements(), [&](auto count) {
        using Index = decltype(count);
        each_pixel_kernel<<<blocks_for(shape.elements(), s), kBlock, 0, raw>>>(
            count, Divisor<Index>{Index(shape[1])}, Divisor<Index>{Index(shape[2])},
            Divisor<Index>{Index(shape[3])}, body);
      });
    });
  }
};

}  // namespace lockstep::cuda
