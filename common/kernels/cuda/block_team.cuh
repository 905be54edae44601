#pragma once
// What a row-wise body runs on: a block of threads, where the CPU uses one thread (cpu/reduce.h).

#include "common/kernels/cuda/launch.cuh"

namespace lockstep::cuda {

struct Sum {
  __device__ Real operator()(Real a, Real b) const { return a + b; }
};
struct Max {
  __device__ Real operator()(Real a, Real b) const { return fmaxf(a, b); }
};

/// A block of threads that works on one row (cpu/reduce.h has a team of one).
struct BlockTeam {
  static constexpr int kWarp = 32;

  template <class F>
  __device__ Real max(int64_t n, F f) const {
    Real top = f(threadIdx.x < n ? threadIdx.x : 0);
    load_ahead(threadIdx.x, n, blockDim.x, f, [&](Real value) { top = fmaxf(top, value); });
    return combine(top, Max());
  }
  template <class F>
  __device__ Real sum(int64_t n, F f) const {
    Real total = 0;
    load_ahead(threadIdx.x, n, blockDim.x, f, [&](Real value) { total += value; });
    return combine(total, Sum());
  }
  template <class F>
  __device__ void each(int64_t n, F f) const {
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) f(i);
  }
  template <class F>
  __device__ void leader(F f) const {
    if (threadIdx.x == 0) f();
  }

 private:
  /// op over the values of all threads: within each warp by shuffles, then over the warps. Every
  /// thread gets the result.
  template <class Op>
  __device__ Real combine(Real value, Op op) const {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      value = op(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    if (blockDim.x <= kWarp) return value;
    __shared__ Real of_warp[kBlock / kWarp];
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = of_warp[0];
    for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) value = op(value, of_warp[warp]);
    __syncthreads();  // before a next combine() writes there
    return value;
  }
};

}  // namespace lockstep::cuda
