#pragma once
// Ranks as errors name them.

#include <cstddef>
#include <string>

#include "common/core/error.h"

namespace lockstep {

/// "1, 3"; of a long list the beginning.
template <class Ranks>
std::string listed(const Ranks& ranks) {
  constexpr size_t kMost = 20;
  std::string text;
  size_t count = 0;
  for (const int rank : ranks) {
    if (count++ < kMost) text += fmt::format("{}{}", text.empty() ? "" : ", ", rank);
  }
  return count > kMost ? text + fmt::format(" and {} more", count - kMost) : text;
}

/// "rank 2", "ranks 1, 3"
template <class Ranks>
std::string name_ranks(const Ranks& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks);
}

}  // namespace lockstep
