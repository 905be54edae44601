#pragma once
// How the bodies that reduce run on a GPU: rows by blocks, columns by sums in a fixed order, and
// "is there any". The same bits in every run: no sum depends on which thread comes first.

#include "common/kernels/cuda/block_team.cuh"
#include "common/kernels/cuda/launch.cuh"

namespace lockstep::cuda {

template <class Body>
__global__ void __launch_bounds__(kBlock) each_team_kernel(int64_t rows, Body body) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) body(BlockTeam(), row);
}

template <class Index, class Body>
__global__ void __launch_bounds__(kBlock) report_if_any_kernel(Index n, Body body) {
  int found = 0;
  grid_stride(n, [&](Index i) { found |= body.found(i); });
  // Several blocks may report: they write the same.
  if (__syncthreads_or(found) && threadIdx.x == 0) body.report();
}

// Sums over the rows of [rows, channels]. A block takes kTile channels, so that neighbouring
// threads read neighbouring addresses, and of the rows every (kLines * gridDim.y)-th kLines.
constexpr int kTile = 32;
constexpr int kLines = kBlock / kTile;

struct ColumnSums {
  double first = 0, second = 0;
};

/// The sum over the block's lines, for the threads of line 0.
__device__ inline ColumnSums sum_lines(ColumnSums mine) {
  __shared__ ColumnSums lines[kLines][kTile];
  lines[threadIdx.y][threadIdx.x] = mine;
  __syncthreads();
  ColumnSums total;
  for (int line = 0; line < kLines; ++line) {
    total.first += lines[line][threadIdx.x].first;
    total.second += lines[line][threadIdx.x].second;
  }
  __syncthreads();
  return total;
}

/// True in all threads of the last block of this tile that comes here; what the others wrote before
/// is then visible to it. Leaves the ticket at zero. (NVIDIA's sample threadFenceReduction.)
__device__ inline bool is_last_block(unsigned* ticket) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    last = atomicAdd(ticket, 1u) == gridDim.y - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  return last;
}

/// `partial` [gridDim.y, channels] holds what each block found; the last one adds it up in order.
template <class Body>
__global__ void __launch_bounds__(kBlock)
    reduce_rows_kernel(int64_t rows, int64_t channels, Body body, ColumnSums* partial,
                       unsigned* block_counters) {
  const int64_t c = int64_t(blockIdx.x) * kTile + threadIdx.x;
  const bool inside = c < channels;
  ColumnSums sums;
  for (int64_t row = blockIdx.y * kLines + threadIdx.y; inside && row < rows;
       row += int64_t(kLines) * gridDim.y) {
    const auto terms = body.terms(row, c);
    sums.first += terms.first;
    sums.second += terms.second;
  }
  sums = sum_lines(sums);
  if (gridDim.y > 1) {
    if (inside && threadIdx.y == 0) partial[blockIdx.y * channels + c] = sums;
    if (!is_last_block(block_counters + blockIdx.x)) return;
    sums = ColumnSums();
    for (unsigned block = threadIdx.y; inside && block < gridDim.y; block += kLines) {
      const volatile ColumnSums& from = partial[block * channels + c];  // not from a cache
      sums.first += from.first;
      sums.second += from.second;
    }
    sums = sum_lines(sums);
  }
  if (inside && threadIdx.y == 0) body.finish(c, sums.first, sums.second);
}

/// All launchers of the CUDA backend, for BodyKernels.
struct Launch : ElementLaunch {
  /// body(team, row) for every row: a warp for each of many rows, a block for a single one.
  template <class Body>
  static void for_each_team(Stream stream, const char* op, int64_t rows, Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t raw) {
      const unsigned blocks = unsigned(std::clamp<int64_t>(rows, 1, 65535));
      each_team_kernel<<<blocks, rows == 1 ? kBlock : kTile, 0, raw>>>(rows, body);
    });
  }

  /// body.report() if body.found(i) for any i in [0, n).
  template <class Body>
  static void report_if_any(Stream stream, const char* op, int64_t n, Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t raw) {
      with_narrow_index(n, [&](auto count) {
        report_if_any_kernel<<<blocks_for(n, s), kBlock, 0, raw>>>(count, body);
      });
    });
  }

  /// Sums body.terms(row, c) over the rows of [rows, channels], then body.finish(c, sums).
  template <class Body>
  static void reduce_rows(Stream stream, const char* op, int64_t rows, int64_t channels,
                          Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t raw) {
      const int64_t tiles = (channels + kTile - 1) / kTile;
      // A block for every 16 rows of a thread, but no more than keep the GPU busy: the last one
      // adds up what all found.
      const int64_t most = tiles > CudaStream::kBlockCounters ? 1 : 2 * s.multiprocessors() / tiles;
      const int64_t blocks =
          std::clamp<int64_t>(rows / (16 * kLines), 1, std::max<int64_t>(1, most));
      void* partial = s.scratch(size_t(blocks * channels) * sizeof(ColumnSums));
      const dim3 grid{unsigned(tiles), unsigned(blocks)}, block{kTile, kLines};
      reduce_rows_kernel<<<grid, block, 0, raw>>>(
          rows, channels, body, static_cast<ColumnSums*>(partial), s.block_counters());
    });
  }
};

}  // namespace lockstep::cuda
