#pragma once
// Memory of the modelled GPUs: malloc'ed, so that AddressSanitizer sees what kernels do with it.

#include <cstddef>
#include <functional>

namespace cuda_model {

constexpr int kMultiprocessors = 2;  // few, so that grid-stride loops have short grids
constexpr int kMaxThreadsPerBlock = 1024;
constexpr int kThreadsSideBySide = 2048;  // on a multiprocessor
constexpr int kSharedMemoryPerBlock = 48 * 1024;

/// Bytes of memory that each GPU has.
size_t capacity();

/// Calls `visit` for every block of GPU memory, with a bit for each physical device that reaches
/// it. With model_mutex() held.
void each_device_block(
    const std::function<void(const void* address, size_t bytes, unsigned reached_by)>& visit);

}  // namespace cuda_model
