#pragma once
// How the bodies that reduce run on a GPU: rows by teams, columns by sums in a fixed order
// (column_sums.cuh), and "is there any". The same bits in every run: no sum depends on which thread
// comes first.

#include "common/kernels/cuda/block_team.cuh"
#include "common/kernels/cuda/column_sums.cuh"
#include "common/kernels/cuda/marked.cuh"

namespace lockstep::cuda {

template <class Body>
__global__ void __launch_bounds__(kBlock) each_team_kernel(int64_t rows, Body body) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) body(BlockTeam(), row);
}

template <class Body>
__global__ void __launch_bounds__(kBlock) report_if_any_kernel(int64_t n, Body body) {
  bool found = false;
  load_ahead(
      int64_t(blockIdx.x) * blockDim.x + threadIdx.x, n, int64_t(gridDim.x) * blockDim.x,
      [&](int64_t i) { return body.found(i); }, [&](bool it) { found |= it; });
  // Several blocks may report: they write the same.
  if (__syncthreads_or(found) && threadIdx.x == 0) body.report();
}

/// All launchers of the CUDA backend, for BodyKernels.
struct Launch : MarkedLaunch {
  /// body(team, row) for every row of `length` elements: a warp for each of many short rows, else a
  /// block.
  template <class Body>
  static void for_each_team(Stream stream, const char* op, int64_t rows, int64_t length,
                            Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t raw) {
      const unsigned blocks = unsigned(std::clamp<int64_t>(rows, 1, 65535));
      const bool short_rows = rows > 1 && length < 4 * kBlock;
      each_team_kernel<<<blocks, short_rows ? BlockTeam::kWarp : kBlock, 0, raw>>>(rows, body);
    });
  }

  /// body.report() if body.found(i) for any i in [0, n).
  template <class Body>
  static void report_if_any(Stream stream, const char* op, int64_t n, Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t raw) {
      report_if_any_kernel<<<blocks_for(n, s), kBlock, 0, raw>>>(n, body);
    });
  }

  /// Sums body.terms(row, c) over the rows of [rows, channels], then body.finish(c, sums).
  template <class Body>
  static void reduce_rows(Stream stream, const char* op, int64_t rows, int64_t channels,
                          Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t raw) {
      const ColumnGrid at(rows, channels);
      void* partial = s.scratch(at.grid.y * size_t(channels) * sizeof(ColumnSums));
      reduce_rows_kernel<<<at.grid, at.block, 0, raw>>>(
          rows, channels, body, static_cast<ColumnSums*>(partial), s.block_counters());
    });
  }
};

}  // namespace lockstep::cuda
