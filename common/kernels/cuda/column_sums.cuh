#pragma once
// Sums over the rows of [rows, channels], in a fixed order.
//
// The threads of a block stand in lines of up to kTile channels, so that neighbouring threads read
// neighbouring addresses; a line takes every (lines * gridDim.y)-th row. Who adds what depends on
// the shape alone: the sums are the same in every run, and on every GPU.

#include <bit>

#include "common/kernels/cuda/launch.cuh"

namespace lockstep::cuda {

constexpr int64_t kTile = 32;
constexpr int kInFlight = 8;          // rows that a thread asks for before it adds the first
constexpr int kSumBlocks = 4;         // per multiprocessor, side by side
constexpr int64_t kMostBlocks = 512;  // that fills 128 multiprocessors
static_assert(kMostBlocks <= CudaStream::kBlockCounters);

/// The blocks of a sum, and the threads of each: (channels, lines).
struct ColumnGrid {
  ColumnGrid(int64_t rows, int64_t channels) {
    const int64_t tile = std::bit_ceil(uint64_t(std::clamp<int64_t>(channels, 1, kTile)));
    const int64_t tiles = (channels + tile - 1) / tile, lines = kBlock / tile;
    // Rows for all that a block can have in flight, but no more blocks than are at work at once:
    // the last one adds up what all found.
    const int64_t most = std::max<int64_t>(1, kMostBlocks / std::max<int64_t>(1, tiles));
    const int64_t blocks = std::clamp<int64_t>(rows / (kInFlight * lines), 1, most);
    grid = dim3{unsigned(tiles), unsigned(blocks)};
    block = dim3{unsigned(tile), unsigned(lines)};
  }
  dim3 grid, block;
};

struct alignas(16) ColumnSums {  // one load
  double first = 0, second = 0;
};

/// The sum of term(i) for i = first, first + step, ... below end. Memory answers after hundreds of
/// cycles, so kInFlight terms are loaded at once, whatever i; which of them count is decided later.
/// They are added in their own type, and only what that gives in double, which most GPUs add at a
/// fraction of the speed.
template <class Term>
__device__ __forceinline__ ColumnSums sum_strided(int64_t first, int64_t end, int64_t step,
                                                  Term term) {
  ColumnSums total;
  for (int64_t i = first; i < end; i += kInFlight * step) {
    decltype(term(i)) terms[kInFlight];
    LOCKSTEP_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t at = i + k * step;
      terms[k] = term(at < end ? at : i);
    }
    LOCKSTEP_UNROLL
    for (int k = 1; k < kInFlight; ++k) {
      const bool counts = i + k * step < end;
      terms[0].first += counts ? terms[k].first : 0;
      terms[0].second += counts ? terms[k].second : 0;
    }
    total.first += terms[0].first;
    total.second += terms[0].second;
  }
  return total;
}

/// The sum over the block's lines, for the threads of line 0: half of the lines to the other half.
__device__ inline ColumnSums sum_lines(ColumnSums mine) {
  __shared__ ColumnSums all[kBlock];
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (unsigned half = kBlock / 2; half >= blockDim.x; half /= 2) {
    all[thread] = mine;
    __syncthreads();
    if (thread < half) {
      mine.first += all[thread + half].first;
      mine.second += all[thread + half].second;
    }
    __syncthreads();
  }
  return mine;
}

/// True in all threads of the last block of this tile that comes here; what the others wrote before
/// is then visible to it. Leaves the ticket at zero. (NVIDIA's sample threadFenceReduction.)
__device__ inline bool is_last_block(unsigned* ticket) {
  __shared__ bool last;
  __threadfence();  // what this block wrote comes before its ticket
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    last = atomicAdd(ticket, 1u) == gridDim.y - 1;
    if (last) *ticket = 0;
    __threadfence();  // and what the last one reads comes after all tickets
  }
  __syncthreads();
  return last;
}

/// `partial` [gridDim.y, channels] holds what each block found; the last one adds it up in order.
template <class Body>
__global__ void __launch_bounds__(kBlock, kSumBlocks)
    reduce_rows_kernel(int64_t rows, int64_t channels, Body body, ColumnSums* partial,
                       unsigned* block_counters) {
  const int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool inside = c < channels;
  const int64_t line = blockIdx.y * blockDim.y + threadIdx.y, lines = blockDim.y * gridDim.y;
  ColumnSums sums =
      sum_strided(line, inside ? rows : 0, lines, [&](int64_t row) { return body.terms(row, c); });
  sums = sum_lines(sums);
  if (gridDim.y > 1) {
    if (inside && threadIdx.y == 0) partial[blockIdx.y * channels + c] = sums;
    if (!is_last_block(block_counters + blockIdx.x)) return;
    sums = sum_strided(threadIdx.y, inside ? gridDim.y : 0, blockDim.y,
                       [&](int64_t block) { return partial[block * channels + c]; });
    sums = sum_lines(sums);
  }
  if (inside && threadIdx.y == 0) body.finish(c, sums.first, sums.second);
}

}  // namespace lockstep::cuda
