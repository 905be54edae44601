#pragma once
// Memory of the host in which CPU devices keep their numbers.

#include <cstddef>

namespace lockstep {

/// Memory that begins at a cache line. Large blocks ask the system for large pages: a kernel that
/// reads many places at once then needs fewer translations of addresses.
void* allocate_aligned(size_t bytes);
void release_aligned(void* memory);

}  // namespace lockstep
