#pragma once
// Memory of the modelled GPUs: malloc'ed, so that AddressSanitizer sees what kernels do with it.

#include <cstddef>

namespace cuda_model {

constexpr int kMultiprocessors = 2;  // few, so that grid-stride loops have short grids
constexpr int kMaxThreadsPerBlock = 1024;
constexpr int kSharedMemoryPerBlock = 48 * 1024;

/// Bytes of memory that each GPU has.
size_t capacity();

}  // namespace cuda_model
