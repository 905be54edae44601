// The device language: what kernels of this project use, and what the model must refuse.
// With an argument it runs one broken kernel, which must end the process.

#include <cstdint>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "expect.h"

namespace kernels {

template <class T, class Body>
__global__ void __launch_bounds__(256) each(T n, Body body) {
  for (T i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) body(i);
}

struct Square {
  const float* x;
  float* y;
  __host__ __device__ __forceinline__ void operator()(int64_t i) const { y[i] = x[i] * x[i]; }
};

/// One block: sum of x by shuffles, then over the warps in shared memory.
__global__ void block_sum(const float* x, int n, float* sum) {
  extern __shared__ float of_warp[];
  float mine = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) mine += x[i];
  for (int distance = 16; distance > 0; distance /= 2) {
    mine += __shfl_down_sync(0xffffffffu, mine, distance);
  }
  if (threadIdx.x % warpSize == 0) of_warp[threadIdx.x / warpSize] = mine;
  __syncthreads();
  if (threadIdx.x > 0) return;
  *sum = 0;
  for (unsigned w = 0; w < blockDim.x / warpSize; ++w) *sum += of_warp[w];
}

__global__ void votes(const int* flags, int* any, int* all) {
  const int one = __syncthreads_or(flags[threadIdx.x]);
  const int both = __syncthreads_and(flags[threadIdx.x]);
  if (threadIdx.x == 0) {
    *any = one;
    *all = both;
  }
}

__global__ void exchange(int* xor_result, int* from_third, int* halves) {
  const int lane = threadIdx.x;
  xor_result[lane] = __shfl_xor_sync(0xffffffffu, lane, 5);
  from_third[lane] = __shfl_sync(0xffffffffu, lane * 10, 3, 8);
  halves[lane] = lane < 16 ? __shfl_down_sync(0x0000ffffu, lane, 8, 16)
                           : __shfl_down_sync(0xffff0000u, lane, 4, 16);
}

/// Each block adds its indices; the last one that comes writes the total.
template <bool fences>
__global__ void last_block_total(double* partial, unsigned* ticket, double* total) {
  __shared__ double sum;
  __shared__ bool last;
  if (threadIdx.x == 0 && threadIdx.y == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, double(threadIdx.y * blockDim.x + threadIdx.x));
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    partial[blockIdx.y] = sum;
    if (fences) __threadfence();
    last = atomicAdd(ticket, 1u) == gridDim.y - 1;
    if (last) {
      *total = 0;
      for (unsigned block = 0; block < gridDim.y; ++block) *total += partial[block];
    }
  }
}

__global__ void divergent_barrier() {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void divergent_shuffle(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(0xffffffffu, 1, 1);
  __syncthreads();
}
__global__ void outside_mask(int* out) { *out = __shfl_sync(0x1u, 1, 0); }
__global__ void add_one_in_each_block(int* x) { *x += 1; }
/// The first warp tells the second one something.
template <bool waits>
__global__ void tell(int value, int* told) {
  __shared__ int message;
  if (threadIdx.x == 0) message = value;
  if (waits) __syncthreads();
  if (threadIdx.x == 32) *told = message;
  __syncthreads();
}
/// Lanes of one warp; an exchange of values orders no memory.
template <bool waits>
__global__ void tell_lane(int value, int* told) {
  __shared__ int message;
  if (threadIdx.x == 0) message = value;
  __shfl_sync(0xffffffffu, 0, 0);
  if (waits) __syncwarp();
  if (threadIdx.x == 1) *told = message;
}
/// In which order the blocks came.
__global__ void come(unsigned* ticket, unsigned* order) {
  order[atomicAdd(ticket, 1u)] = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
}
__global__ void past_the_end(float* x, int n) { x[n + threadIdx.x] = 1; }
__global__ void nothing() {}

}  // namespace kernels

template <bool fences>
double last_block(cudaStream_t stream) {
  double* partial = upload<double>(std::vector<double>(7), stream);
  unsigned* ticket = upload<unsigned>(std::vector<unsigned>(1), stream);
  double* total = upload<double>(std::vector<double>(1), stream);
  const dim3 grid{1, 7}, block{32, 3};
  kernels::last_block_total<fences><<<grid, block, 0, stream>>>(partial, ticket, total);
  return download<std::vector<double>>(total, 1, stream)[0];
}

void broken(const std::string& what, cudaStream_t stream) {
  int* out = upload<int>(std::vector<int>(32), stream);
  if (what == "barrier") kernels::divergent_barrier<<<1, 32, 0, stream>>>();
  if (what == "shuffle") kernels::divergent_shuffle<<<1, 32, 0, stream>>>(out);
  if (what == "mask") kernels::outside_mask<<<1, 2, 0, stream>>>(out);
  if (what == "memory") kernels::past_the_end<<<1, 1, 0, stream>>>((float*)out, 32);
  if (what == "blocks") kernels::add_one_in_each_block<<<8, 1, 0, stream>>>(out);
  if (what == "fence") last_block<false>(stream);
  if (what == "warps") kernels::tell<false><<<1, 64, 0, stream>>>(1, out);
  if (what == "lanes") kernels::tell_lane<false><<<1, 32, 0, stream>>>(1, out);
  OK(cudaStreamSynchronize(stream));
}

void element_wise(cudaStream_t stream) {
  std::vector<float> x(10001);
  std::iota(x.begin(), x.end(), 0.0f);
  const float* in = upload<float>(x, stream);
  float* out = upload<float>(x, stream);
  kernels::each<<<2, dim3(96), 0, stream>>>(int64_t(x.size()), kernels::Square{in, out});
  OK(cudaGetLastError());
  const auto y = download<std::vector<float>>(out, x.size(), stream);
  for (size_t i = 0; i < x.size(); ++i) EXPECT(y[i] == x[i] * x[i]);
}

void reductions(cudaStream_t stream) {
  const std::vector<float> x(1000, 0.5f);
  float* sum = upload<float>(std::vector<float>(1), stream);
  kernels::block_sum<<<1, 256, 8 * sizeof(float), stream>>>(upload<float>(x, stream), 1000, sum);
  EXPECT(download<std::vector<float>>(sum, 1, stream)[0] == 500);
  EXPECT(last_block<true>(stream) == 7 * 95 * 96 / 2);
}

void warp_operations(cudaStream_t stream) {
  std::vector<int> flags(64, 1);
  flags[40] = 0;
  int* in = upload<int>(flags, stream);
  int* out = upload<int>(std::vector<int>(96), stream);
  kernels::votes<<<1, 64, 0, stream>>>(in, out, out + 1);
  const auto vote = download<std::vector<int>>(out, 2, stream);
  EXPECT(vote[0] == 1);
  EXPECT(vote[1] == 0);
  kernels::exchange<<<1, 32, 0, stream>>>(out, out + 32, out + 64);
  const auto got = download<std::vector<int>>(out, 96, stream);
  for (int lane = 0; lane < 32; ++lane) {
    EXPECT(got[lane] == (lane ^ 5));
    EXPECT(got[32 + lane] == (lane / 8 * 8 + 3) * 10);
    const int moved = lane + (lane < 16 ? 8 : 4);
    EXPECT(got[64 + lane] == (moved / 16 == lane / 16 ? moved : lane));
  }
}

void barriers(cudaStream_t stream) {
  int* told = upload<int>(std::vector<int>(1), stream);
  for (int value = 1; value <= 20; ++value) {
    kernels::tell<true><<<1, 64, 0, stream>>>(value, told);
    EXPECT(download<std::vector<int>>(told, 1, stream)[0] == value);
    kernels::tell_lane<true><<<1, 32, 0, stream>>>(-value, told);
    EXPECT(download<std::vector<int>>(told, 1, stream)[0] == -value);
  }
}

/// Prints the order of a kernel's blocks, and how often a warp was told the right thing by a warp
/// for which it did not wait.
void order(cudaStream_t stream) {
  unsigned* ticket = upload<unsigned>(std::vector<unsigned>(1), stream);
  unsigned* order = upload<unsigned>(std::vector<unsigned>(12), stream);
  kernels::come<<<dim3(3, 2, 2), 1, 0, stream>>>(ticket, order);
  for (unsigned block : download<std::vector<unsigned>>(order, 12, stream)) {
    std::printf("%u ", block);
  }
  int* told = upload<int>(std::vector<int>(1), stream);
  int right = 0;
  for (int value = 1; value <= 50; ++value) {
    kernels::tell<false><<<1, 64, 0, stream>>>(value, told);
    right += download<std::vector<int>>(told, 1, stream)[0] == value;
  }
  std::printf("right %d\n", right);
}

void launch_errors(cudaStream_t stream) {
  kernels::nothing<<<0, 32, 0, stream>>>();
  EXPECT_CODE(cudaGetLastError(), cudaErrorInvalidConfiguration);
  int blocks = 0;
  const auto* const nothing = reinterpret_cast<const void*>(kernels::nothing);
  OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, nothing, 256, 0));
  EXPECT(blocks == 8);
  OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, nothing, 1025, 0));
  EXPECT(blocks == 0);
  kernels::nothing<<<1, 1025, 0, stream>>>();
  EXPECT_CODE(cudaGetLastError(), cudaErrorInvalidConfiguration);
  kernels::nothing<<<1, 1>>>();  // the legacy default stream
  EXPECT_CODE(cudaPeekAtLastError(), cudaErrorInvalidResourceHandle);
  EXPECT_CODE(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  OK(cudaGetLastError());
}

int main(int argc, char** argv) {
  cudaStream_t stream = make_stream();
  if (argc > 1 && argv[1] == std::string("order")) {
    order(stream);
    return 0;
  }
  if (argc > 1) {
    broken(argv[1], stream);
    return 0;
  }
  element_wise(stream);
  reductions(stream);
  warp_operations(stream);
  barriers(stream);
  launch_errors(stream);
  std::puts("<<<text>>>(stays) as it is");  // not a launch
  return expect_failures == 0 ? 0 : 1;
}
