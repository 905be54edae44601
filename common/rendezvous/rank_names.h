#pragma once
// Ranks as errors name them.

#include <string>

#include "common/core/listed.h"

namespace lockstep {

/// "rank 2", "ranks 1, 3"
template <class Ranks>
std::string name_ranks(const Ranks& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks);
}

}  // namespace lockstep
