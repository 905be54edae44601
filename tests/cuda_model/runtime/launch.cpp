// Kernel launches: the grid as one task of a stream, block after block.

#include <algorithm>
#include <utility>

#include "runtime/block.h"
#include "runtime/environment.h"
#include "runtime/memory.h"
#include "runtime/model.h"
#include "runtime/team.h"

CUDA_MODEL_PER_THREAD uint3 threadIdx, blockIdx;
CUDA_MODEL_PER_THREAD dim3 blockDim, gridDim;

namespace cuda_model {
namespace {

CUDA_MODEL_PER_THREAD void* shared_memory = nullptr;
CUDA_MODEL_PER_THREAD Block* running_block = nullptr;

/// Runs every `step`-th block of `order`.
void run_blocks(const Launch& launch, const std::function<void()>& thread, uint64_t seed,
                const std::vector<unsigned>& order, size_t first, size_t step) {
  // Each block is separate on the heap: AddressSanitizer then sees accesses past its end.
  const auto shared = std::make_unique<std::vector<char>>(launch.shared_bytes);
  shared_memory = shared->data();
  static thread_local Block block;
  running_block = &block;
  blockDim = launch.block;
  gridDim = launch.grid;
  for (size_t i = first; i < order.size(); i += step) {
    const unsigned x = order[i] % gridDim.x, rest = order[i] / gridDim.x;
    blockIdx = {x, rest % gridDim.y, rest / gridDim.y};
    block.run(launch, thread, seed == 0 ? 0 : seed + order[i]);
  }
}

/// How the environment at the launch wants a kernel to run.
struct Manner {
  uint64_t seed = static_cast<uint64_t>(integer_variable("CUDA_MODEL_SEED", 1));
  size_t threads = static_cast<size_t>(std::max(1, integer_variable("CUDA_MODEL_THREADS", 1)));
};

void run_grid(const Launch& launch, const std::function<void()>& thread, const Manner& manner) {
  static thread_local uint64_t launches = 0;  // of this stream
  static thread_local Team team;
  const uint64_t seed = manner.seed == 0 ? 0 : (manner.seed << 32) + (++launches << 8);
  const std::vector<unsigned> order = shuffled(launch.grid.x * launch.grid.y * launch.grid.z, seed);
  const size_t threads = std::min(manner.threads, order.size());
  team.run(threads,
           [&](size_t member) { run_blocks(launch, thread, seed, order, member, threads); });
}

cudaError_t check(const Launch& launch) {
  const dim3 &g = launch.grid, &b = launch.block;
  if (capability().major < 7) return cudaErrorNoKernelImageForDevice;
  const bool grid_fits =
      g.x > 0 && g.y > 0 && g.z > 0 && g.x <= 2147483647u && g.y <= 65535u && g.z <= 65535u;
  const bool block_fits = b.x > 0 && b.y > 0 && b.z > 0 && b.z <= 64u &&
                          uint64_t{b.x} * b.y * b.z <= kMaxThreadsPerBlock;
  if (!grid_fits || !block_fits) return cudaErrorInvalidConfiguration;
  return launch.shared_bytes <= kSharedMemoryPerBlock ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

void Launch::enqueue(std::function<void()> thread) const {
  api("kernel", [&] {
    if (const cudaError_t error = check(*this)) return error;
    return enqueue_kernel(stream, [launch = *this, thread = std::move(thread), manner = Manner()] {
      run_grid(launch, thread, manner);
    });
  });
}

void* dynamic_shared_memory() { return shared_memory; }

int block_barrier(Vote vote, int predicate, const char* file, int line) {
  return running_block->barrier(vote, predicate, file, line);
}
uint64_t warp_exchange(unsigned mask, uint64_t value, int source, const char* file, int line) {
  return running_block->exchange(mask, value, source, file, line);
}
int lane() { return running_block->lane(); }
void warp_barrier(unsigned mask, const char* file, int line) {
  running_block->warp_barrier(mask, file, line);
}

void fence() { running_block->fence(); }
bool has_fenced() { return running_block->has_fenced(); }

}  // namespace cuda_model

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  using namespace cuda_model;
  return api("cudaFuncGetAttributes", [&] {
    if (attributes == nullptr || function == nullptr) return cudaErrorInvalidDeviceFunction;
    if (current_device() == nullptr) return cudaErrorNoDevice;
    if (capability().major < 7) return cudaErrorNoKernelImageForDevice;
    *attributes = {};
    attributes->maxThreadsPerBlock = kMaxThreadsPerBlock;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion =
        10 * capability().major + capability().minor;
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                          int threads, size_t shared_bytes) {
  using namespace cuda_model;
  return api("cudaOccupancyMaxActiveBlocksPerMultiprocessor", [&] {
    if (function == nullptr) return cudaErrorInvalidDeviceFunction;
    if (blocks == nullptr || threads < 1) return cudaErrorInvalidValue;
    if (current_device() == nullptr) return cudaErrorNoDevice;
    const bool fits = threads <= kMaxThreadsPerBlock && shared_bytes <= kSharedMemoryPerBlock;
    *blocks = fits ? integer_variable("CUDA_MODEL_SIDE_BY_SIDE", kThreadsSideBySide) / threads : 0;
    return cudaSuccess;
  });
}
