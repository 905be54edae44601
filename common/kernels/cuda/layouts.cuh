#pragma once
// Copies of a convolution's tensors: with the channels elsewhere, of every n-th pixel, or with
// zeros between the pixels.

#include <algorithm>

#include "common/kernels/bodies/elementwise.inl"
#include "common/kernels/cuda/cuda_kernels.h"
#include "common/kernels/cuda/cuda_stream.h"
#include "common/kernels/cuda/launch.cuh"

namespace lockstep::cuda {

constexpr int kTileSide = 32;  // a warp reads or writes one line of a tile: 128 bytes in a row
constexpr int kTileLines = 8;  // that a block moves at a time

using Tile = Real[kTileSide][kTileSide + 1];  // + 1: a column lies in 32 different banks

/// Rows are read along the old order and written along the new.
template <class From, class To>
__device__ __forceinline__ void transpose_tile(const Transpose<From, To>& t, int64_t image,
                                               int left, int top, Tile& tile) {
  const int rows = int(t.rows), columns = int(t.columns);  // of one image
  const int x = int(threadIdx.x), y = int(threadIdx.y);
  const int from_column = left + x < columns ? left + x : columns - 1;
  const From* const from = t.from + image * rows * columns;
  To* const to = t.to + image * rows * columns;
  LOCKSTEP_UNROLL
  for (int first = 0; first < kTileSide; first += kTileLines) {
    const int line = first + y;
    const int row = top + line < rows ? top + line : rows - 1;  // no load waits for a decision
    tile[line][x] = from[row * columns + from_column];
  }
  __syncthreads();
  const bool inside = top + x < rows;
  const Real bias = t.bias != nullptr && inside ? t.bias[top + x] : Real(0);
  LOCKSTEP_UNROLL
  for (int first = 0; first < kTileSide; first += kTileLines) {
    const int line = first + y;
    if (inside && left + line < columns) {
      To& element = to[(left + line) * rows + top + x];
      element = (t.add ? Real(element) : bias) + tile[x][line];
    }
  }
  __syncthreads();  // before the next tile is written
}

/// Tiles pass through shared memory. The grid has a block per tile of an image, and the images
/// along z; of rows and images it may have fewer, which are then taken in strides.
template <class From, class To>
__global__ void __launch_bounds__(kTileSide* kTileLines) transpose_kernel(Transpose<From, To> t) {
  __shared__ Tile tile;
  const int left = int(blockIdx.x) * kTileSide;
  for (int64_t image = blockIdx.z; image < t.images; image += gridDim.z) {
    for (int top = int(blockIdx.y) * kTileSide; top < t.rows; top += int(gridDim.y) * kTileSide) {
      transpose_tile(t, image, left, top, tile);
    }
  }
}

template <class From, class To>
void transpose(CudaStream& stream, const Transpose<From, To>& t) {
  const auto tiles = [](int64_t n) { return (n + kTileSide - 1) / kTileSide; };
  constexpr int64_t kMost = 65535;  // blocks along y and z; along x 2^31 - 1
  const dim3 grid{unsigned(tiles(t.columns)), unsigned(std::min(tiles(t.rows), kMost)),
                  unsigned(std::min(t.images, kMost))};
  transpose_kernel<<<grid, dim3{kTileSide, kTileLines}, 0, stream.raw()>>>(t);
}

template <class T>
struct TakePixels {
  PixelGrid at;
  const T* many;
  T* few;
  __device__ void operator()(int64_t n, int64_t h, int64_t w, int64_t c) const {
    few[((n * at.few_height + h) * at.few_width + w) * at.channels + c] =
        many[((n * at.many_height + h * at.stride) * at.many_width + w * at.stride) * at.channels +
             c];
  }
};

template <class T>
struct SpreadPixels {
  PixelGrid at;
  Divisor<uint32_t> stride;
  const T* few;
  T* many;
  __device__ void operator()(int64_t n, int64_t h, int64_t w, int64_t c) const {
    const uint32_t row = stride.quotient(uint32_t(h)), column = stride.quotient(uint32_t(w));
    const bool taken = row * at.stride == h && column * at.stride == w && row < at.few_height &&
                       column < at.few_width;
    many[((n * at.many_height + h) * at.many_width + w) * at.channels + c] =
        taken ? few[((n * at.few_height + row) * at.few_width + column) * at.channels + c] : T(0);
  }
};

template <class T>
void take_pixels(CudaStream& stream, const PixelGrid& at, const T* many, T* few) {
  const Shape shape{at.images, at.few_height, at.few_width, at.channels};
  launch_pixels(stream, shape, TakePixels<T>{at, many, few});
}

template <class T>
void spread_pixels(CudaStream& stream, const PixelGrid& at, const T* few, T* many) {
  const Shape shape{at.images, at.many_height, at.many_width, at.channels};
  launch_pixels(stream, shape,
                SpreadPixels<T>{at, Divisor<uint32_t>(uint32_t(at.stride)), few, many});
}

template <class T>
void add_to(CudaStream& stream, int64_t n, const T* x, Real* y) {
  launch_each(stream, n, bodies::Add<T, Real>{x, y});
}

// The rest of the backend, which nvcc does not compile, calls these.
template void add_to(CudaStream&, int64_t, const Bf16*, Real*);
template void add_to(CudaStream&, int64_t, const Fp16*, Real*);
template void transpose(CudaStream&, const Transpose<Real, Real>&);
template void transpose(CudaStream&, const Transpose<Bf16, Bf16>&);
template void transpose(CudaStream&, const Transpose<Bf16, Real>&);
template void transpose(CudaStream&, const Transpose<Fp16, Fp16>&);
template void transpose(CudaStream&, const Transpose<Fp16, Real>&);
template void take_pixels(CudaStream&, const PixelGrid&, const Real*, Real*);
template void take_pixels(CudaStream&, const PixelGrid&, const Bf16*, Bf16*);
template void take_pixels(CudaStream&, const PixelGrid&, const Fp16*, Fp16*);
template void spread_pixels(CudaStream&, const PixelGrid&, const Real*, Real*);
template void spread_pixels(CudaStream&, const PixelGrid&, const Bf16*, Bf16*);
template void spread_pixels(CudaStream&, const PixelGrid&, const Fp16*, Fp16*);

}  // namespace lockstep::cuda
