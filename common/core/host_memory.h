#pragma once
// Memory of the host in which CPU devices keep their numbers.

#include <array>
#include <cstddef>

namespace lockstep {

/// Memory that begins at a cache line. Large blocks ask the system for large pages: a kernel that
/// reads many places at once then needs fewer translations of addresses.
void* allocate_aligned(size_t bytes);
void release_aligned(void* memory);

/// What an error adds where the system gave no memory: "; ulimit -v is 200000 KiB here: raise it",
/// or, without such a limit, the other place to look at. Asks for no memory itself.
std::array<char, 80> memory_limit_note();

}  // namespace lockstep
