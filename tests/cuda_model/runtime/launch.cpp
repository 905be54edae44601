// Kernel launches: the grid as one task of a stream, block after block.

#include "runtime/block.h"
#include "runtime/environment.h"
#include "runtime/memory.h"
#include "runtime/model.h"

__thread uint3 threadIdx, blockIdx;
__thread dim3 blockDim, gridDim;

namespace cuda_model {
namespace {

thread_local void* shared_memory = nullptr;

Block& block_of_this_thread() {
  static thread_local Block block;
  return block;
}

void run_grid(const Launch& launch, const std::function<void()>& thread) {
  // Each block is separate on the heap: AddressSanitizer then sees accesses past its end.
  const auto shared = std::make_unique<std::vector<char>>(launch.shared_bytes);
  shared_memory = shared->data();
  blockDim = launch.block;
  gridDim = launch.grid;
  for (unsigned z = 0; z < launch.grid.z; ++z) {
    for (unsigned y = 0; y < launch.grid.y; ++y) {
      for (unsigned x = 0; x < launch.grid.x; ++x) {
        blockIdx = {x, y, z};
        block_of_this_thread().run(launch, thread);
      }
    }
  }
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
    return enqueue_kernel(
        stream, [launch = *this, thread = std::move(thread)] { run_grid(launch, thread); });
  });
}

void* dynamic_shared_memory() { return shared_memory; }

int block_barrier(Vote vote, int predicate, const char* file, int line) {
  return block_of_this_thread().barrier(vote, predicate, file, line);
}
uint64_t warp_exchange(unsigned mask, uint64_t value, int source, const char* file, int line) {
  return block_of_this_thread().exchange(mask, value, source, file, line);
}
int lane() { return block_of_this_thread().lane(); }

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
