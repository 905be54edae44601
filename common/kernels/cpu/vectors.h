#pragma once
// Vector registers, for the convolutions that the CPU backend computes itself.

#include <cstdint>
#include <cstring>
#include <utility>

#include "common/core/real.h"

namespace lockstep::cpu {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif
/// Whether these convolutions were measured to be worth it on such a processor.
constexpr bool kWideVectors = kVectorBytes >= 32;

/// A register of numbers. Operators work on all of its numbers side by side.
using Lanes [[gnu::vector_size(kVectorBytes)]] = Real;
constexpr int64_t kLanes = kVectorBytes / sizeof(Real);

inline Lanes load(const Real* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

inline void store(const Lanes& lanes, Real* to) { std::memcpy(to, &lanes, sizeof(lanes)); }

/// Exchanges the numbers beside the diagonal in every square of 2 step x 2 step.
template <size_t step, size_t... k>
inline void exchange(Lanes& upper, Lanes& lower, std::index_sequence<k...>) {
  const Lanes a = upper, b = lower;
  upper = __builtin_shufflevector(a, b, int(k & step ? kLanes + (k ^ step) : k)...);
  lower = __builtin_shufflevector(a, b, int(k & step ? kLanes + k : k | step)...);
}

template <size_t step = 1>
inline void transpose(Lanes (&rows)[kLanes]) {
  if constexpr (step < kLanes) {
    constexpr auto all = std::make_index_sequence<kLanes>();
#pragma GCC unroll 16
    for (size_t i = 0; i < kLanes; ++i) {
      if ((i & step) == 0) exchange<step>(rows[i], rows[i | step], all);
    }
    transpose<2 * step>(rows);
  }
}

/// kLanes samples of n numbers each, one sample after another, to n vectors of samples.
inline void to_lanes(const Real* x, int64_t n, Lanes* lanes) {
  const int64_t squares = n / kLanes * kLanes;
  for (int64_t i = 0; i < squares; i += kLanes) {
    Lanes rows[kLanes];
    for (int64_t k = 0; k < kLanes; ++k) rows[k] = load(x + k * n + i);
    transpose(rows);
    for (int64_t k = 0; k < kLanes; ++k) lanes[i + k] = rows[k];
  }
  for (int64_t i = squares; i < n; ++i) {
    for (int64_t k = 0; k < kLanes; ++k) lanes[i][k] = x[k * n + i];
  }
}

/// The way back.
inline void from_lanes(const Lanes* lanes, int64_t n, Real* x) {
  const int64_t squares = n / kLanes * kLanes;
  for (int64_t i = 0; i < squares; i += kLanes) {
    Lanes rows[kLanes];
    for (int64_t k = 0; k < kLanes; ++k) rows[k] = lanes[i + k];
    transpose(rows);
    for (int64_t k = 0; k < kLanes; ++k) store(rows[k], x + k * n + i);
  }
  for (int64_t i = squares; i < n; ++i) {
    for (int64_t k = 0; k < kLanes; ++k) x[k * n + i] = lanes[i][k];
  }
}

}  // namespace lockstep::cpu
