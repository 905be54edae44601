#pragma once
// Division of the index of an element by an extent that the host knows.

#include <bit>
#include <cstdint>

namespace lockstep::cuda {

/// Whole numbers divided by `divisor`, at least 1.
template <class Index>
struct Divisor {
  Index divisor;
  __host__ __device__ constexpr Index quotient(Index i) const { return i / divisor; }
};

/// 32 bits, for numbers below 2^31: a multiplication and a shift, where the GPU's own division
/// takes a dozen instructions (Granlund and Montgomery, "Division by invariant integers using
/// multiplication", 1994).
template <>
struct Divisor<uint32_t> {
  explicit constexpr Divisor(uint32_t extent)
      : divisor(extent > 0 ? extent : 1),  // 0: an empty array, of which no kernel reads anything
        shift(uint32_t(std::bit_width(divisor - 1))),
        factor(uint32_t((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor) / divisor + 1)) {}
  __host__ __device__ constexpr uint32_t quotient(uint32_t i) const {
    return (uint32_t(uint64_t{i} * factor >> 32) + i) >> shift;
  }
  uint32_t divisor, shift, factor;
};
static_assert(Divisor<uint32_t>(0).quotient(0) == 0);
static_assert(Divisor<uint32_t>(1).quotient(0x7fffffff) == 0x7fffffff);
static_assert(Divisor<uint32_t>(7).quotient(0x7fffffff) == 0x7fffffff / 7);
static_assert(Divisor<uint32_t>(64).quotient(64 * 33 - 1) == 32);

}  // namespace lockstep::cuda
