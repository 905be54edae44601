#pragma once
// The device language for kernels that g++ compiles. Each thread of a block is a fiber of the
// stream's worker thread (runtime/fibers.cpp), so `static thread_local` memory is a block's own.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// bin/nvcc turns this name into `static thread_local`, or, after extern, into the launch's memory.
#define __shared__ cuda_model_shared

// Kernels read these all the time. As "initial-exec" they are found without a call, which would be
// one into AddressSanitizer.
#define CUDA_MODEL_PER_THREAD __attribute__((tls_model("initial-exec"))) __thread
extern CUDA_MODEL_PER_THREAD uint3 threadIdx, blockIdx;
extern CUDA_MODEL_PER_THREAD dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace cuda_model {

/// One launch: the text between <<< and >>>. bin/nvcc writes
/// `Launch("kernel", grid, block, shared, stream)([=](auto... a) { kernel(a...); }, arguments)`.
struct Launch {
  const char* kernel;
  dim3 grid, block;
  size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;

  template <class Call, class... Arguments>
  void operator()(Call call, Arguments... arguments) const {
    enqueue([=] { call(arguments...); });
  }
  void enqueue(std::function<void()> thread) const;
};

/// Memory of the current launch: its third <<<>>> argument in bytes.
void* dynamic_shared_memory();

enum class Vote { none, any, all };
/// Waits for the block. Returns the vote on `predicate`.
int block_barrier(Vote vote, int predicate, const char* file, int line);
/// Waits for the lanes of `mask`; returns what lane `source` of this warp brought.
uint64_t warp_exchange(unsigned mask, uint64_t value, int source, const char* file, int line);
/// Waits for the lanes of `mask` and orders their memory accesses.
void warp_barrier(unsigned mask, const char* file, int line);
/// fence() notes a fence of the calling thread, after which its atomic operations pass on what it
/// has written. has_fenced() says so, for ThreadSanitizer, which does not know fences.
void fence();
bool has_fenced();
/// Index of the calling thread in its warp.
int lane();

template <class T>
T shuffle(unsigned mask, T value, int source, int first, int width, const char* file, int line) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
  const bool inside = source >= first && source < first + width;  // else a lane keeps its own
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = warp_exchange(mask, bits, inside ? source : lane(), file, line);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace cuda_model

#define CUDA_MODEL_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(CUDA_MODEL_HERE) {
  cuda_model::block_barrier(cuda_model::Vote::none, 0, file, line);
}
inline int __syncthreads_or(int predicate, CUDA_MODEL_HERE) {
  return cuda_model::block_barrier(cuda_model::Vote::any, predicate, file, line);
}
inline int __syncthreads_and(int predicate, CUDA_MODEL_HERE) {
  return cuda_model::block_barrier(cuda_model::Vote::all, predicate, file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_MODEL_HERE) {
  cuda_model::warp_barrier(mask, file, line);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, CUDA_MODEL_HERE) {
  const int first = cuda_model::lane() / width * width;
  return cuda_model::shuffle(mask, value, first + source % width, first, width, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, CUDA_MODEL_HERE) {
  const int lane = cuda_model::lane();
  return cuda_model::shuffle(mask, value, lane + int(delta), lane / width * width, width, file,
                             line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, CUDA_MODEL_HERE) {
  const int lane = cuda_model::lane();
  return cuda_model::shuffle(mask, value, lane - int(delta), lane / width * width, width, file,
                             line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize, CUDA_MODEL_HERE) {
  const int lane = cuda_model::lane();
  return cuda_model::shuffle(mask, value, lane ^ bits, lane / width * width, width, file, line);
}
#undef CUDA_MODEL_HERE

// An atomic operation orders nothing by itself; fences do. What was written before a fence passes
// to whoever sees the operation after it: NVIDIA's own sample (threadFenceReduction) has no other
// fence.
#ifdef __SANITIZE_THREAD__
inline void __threadfence() { cuda_model::fence(); }
inline void __threadfence_block() {}
inline std::memory_order cuda_model_order() {
  return cuda_model::has_fenced() ? std::memory_order_acq_rel : std::memory_order_acquire;
}
#else
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() { std::atomic_thread_fence(std::memory_order_seq_cst); }
constexpr std::memory_order cuda_model_order() { return std::memory_order_relaxed; }
#endif

#define CUDA_MODEL_ATOMIC_ADD(T)                                              \
  inline T atomicAdd(T* address, T value) {                                   \
    return std::atomic_ref<T>(*address).fetch_add(value, cuda_model_order()); \
  }
CUDA_MODEL_ATOMIC_ADD(int)
CUDA_MODEL_ATOMIC_ADD(unsigned int)
CUDA_MODEL_ATOMIC_ADD(unsigned long long)
CUDA_MODEL_ATOMIC_ADD(float)
CUDA_MODEL_ATOMIC_ADD(double)
#undef CUDA_MODEL_ATOMIC_ADD
template <class T>
T atomicExch(T* address, T value) {
  return std::atomic_ref<T>(*address).exchange(value, cuda_model_order());
}
template <class T>
T atomicCAS(T* address, T compare, T value) {
  std::atomic_ref<T>(*address).compare_exchange_strong(compare, value, cuda_model_order());
  return compare;
}

template <class T>
T __ldg(const T* address) {
  return *address;
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
