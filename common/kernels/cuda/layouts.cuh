#pragma once
// Copies of a convolution's tensors: with the channels elsewhere, of every n-th pixel, or with
// zeros between the pixels.

#include "common/kernels/cuda/cuda_kernels.h"
#include "common/kernels/cuda/cuda_stream.h"
#include "common/kernels/cuda/launch.cuh"

namespace lockstep::cuda {

constexpr int kTileSide = 32;  // a warp reads or writes one line of a tile: 128 bytes in a row
constexpr int kTileLines = 8;  // that a block moves at a time

/// Tiles pass through shared memory: rows are read along the old order and written along the new.
__global__ void __launch_bounds__(kTileSide* kTileLines)
    transpose_kernel(Transpose t, int64_t tiles_down, int64_t tiles_across) {
  __shared__ Real tile[kTileSide][kTileSide + 1];  // + 1: a column lies in 32 different banks
  for (int64_t i = blockIdx.x; i < t.images * tiles_down * tiles_across; i += gridDim.x) {
    const int64_t first_column = i % tiles_across * kTileSide;
    const int64_t first_row = i / tiles_across % tiles_down * kTileSide;
    const int64_t image = i / tiles_across / tiles_down * t.rows * t.columns;
    const int64_t from_column = first_column + threadIdx.x, to_row = first_row + threadIdx.x;
    LOCKSTEP_UNROLL
    for (int line = 0; line < kTileSide; line += kTileLines) {
      const int64_t row = first_row + line + threadIdx.y;
      if (row < t.rows && from_column < t.columns)
        tile[line + threadIdx.y][threadIdx.x] = t.from[image + row * t.columns + from_column];
    }
    __syncthreads();
    const Real bias = t.bias != nullptr && to_row < t.rows ? t.bias[to_row] : Real(0);
    LOCKSTEP_UNROLL
    for (int line = 0; line < kTileSide; line += kTileLines) {
      const int64_t column = first_column + line + threadIdx.y;
      if (column < t.columns && to_row < t.rows) {
        Real* const to = t.to + image + column * t.rows + to_row;
        *to = (t.add ? *to : bias) + tile[threadIdx.x][line + threadIdx.y];
      }
    }
    __syncthreads();  // before the next tile is written
  }
}

void transpose(CudaStream& stream, const Transpose& t) {
  const int64_t down = (t.rows + kTileSide - 1) / kTileSide;
  const int64_t across = (t.columns + kTileSide - 1) / kTileSide;
  const unsigned blocks = blocks_for(t.images * down * across * kBlock, stream);
  transpose_kernel<<<blocks, dim3{kTileSide, kTileLines}, 0, stream.raw()>>>(t, down, across);
}

struct TakePixels {
  PixelGrid at;
  const Real* many;
  Real* few;
  __device__ void operator()(int64_t n, int64_t h, int64_t w, int64_t c) const {
    few[((n * at.few_height + h) * at.few_width + w) * at.channels + c] =
        many[((n * at.many_height + h * at.stride) * at.many_width + w * at.stride) * at.channels +
             c];
  }
};

struct SpreadPixels {
  PixelGrid at;
  Divisor<uint32_t> stride;
  const Real* few;
  Real* many;
  __device__ void operator()(int64_t n, int64_t h, int64_t w, int64_t c) const {
    const uint32_t row = stride.quotient(uint32_t(h)), column = stride.quotient(uint32_t(w));
    const bool taken = row * at.stride == h && column * at.stride == w && row < at.few_height &&
                       column < at.few_width;
    many[((n * at.many_height + h) * at.many_width + w) * at.channels + c] =
        taken ? few[((n * at.few_height + row) * at.few_width + column) * at.channels + c]
              : Real(0);
  }
};

void take_pixels(CudaStream& stream, const PixelGrid& at, const Real* many, Real* few) {
  const Shape shape{at.images, at.few_height, at.few_width, at.channels};
  launch_pixels(stream, shape, TakePixels{at, many, few});
}

void spread_pixels(CudaStream& stream, const PixelGrid& at, const Real* few, Real* many) {
  const Shape shape{at.images, at.many_height, at.many_width, at.channels};
  launch_pixels(stream, shape, SpreadPixels{at, Divisor<uint32_t>(uint32_t(at.stride)), few, many});
}

}  // namespace lockstep::cuda
