#pragma once
// Vector registers, for the convolutions that the CPU backend computes itself.

#include <cstdint>
#include <cstring>

#include "common/core/real.h"

namespace lockstep::cpu {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif
/// Whether these convolutions were measured to pay on such a processor.
constexpr bool kWideVectors = kVectorBytes >= 32;

/// One register of numbers, which the operators treat side by side.
using Lanes [[gnu::vector_size(kVectorBytes)]] = Real;
constexpr int64_t kLanes = kVectorBytes / sizeof(Real);

inline Lanes load(const Real* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

inline void store(const Lanes& lanes, Real* to) { std::memcpy(to, &lanes, sizeof(lanes)); }

}  // namespace lockstep::cpu
