#pragma once
// The sum over ranks that collectives in one process are made of.

#include <cstdint>

namespace lockstep {

constexpr int kMostRanks = 16;  // in one process

/// The numbers that collectives carry.
enum class ElementType { f32, f64, i64 };

/// target[t][i] = factor * (source[0][i] + source[1][i] + ...) for i in [0, count) and every
/// target. The ranks are added in their order, so that every target gets the same bits, in every
/// run. A target may be one of the sources.
struct RankSum {
  ElementType type = ElementType::f32;
  int64_t count = 0;
  double factor = 1;  // not for i64
  int sources = 0, targets = 0;
  const void* source[kMostRanks] = {};
  void* target[kMostRanks] = {};
};

}  // namespace lockstep
