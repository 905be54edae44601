#pragma once
// Sums over ranks, element by element: operator()(i).

#include "common/kernels/bodies/portable.h"
#include "common/kernels/rank_sum.h"

namespace lockstep::bodies {

/// As RankSum. Reads all sources before it writes, so that a target may be a source.
template <class T>
struct SumRanks {
  explicit SumRanks(const RankSum& sum)
      : factor(static_cast<T>(sum.factor)), sources(sum.sources), targets(sum.targets) {
    for (int s = 0; s < sources; ++s) source[s] = static_cast<const T*>(sum.source[s]);
    for (int t = 0; t < targets; ++t) target[t] = static_cast<T*>(sum.target[t]);
  }
  LOCKSTEP_BODY void operator()(int64_t i) const {
    T total = source[0][i];
    for (int s = 1; s < sources; ++s) total += source[s][i];
    total *= factor;
    for (int t = 0; t < targets; ++t) target[t][i] = total;
  }

  T factor;
  int sources, targets;
  const T* source[kMostRanks];
  T* target[kMostRanks];
};

}  // namespace lockstep::bodies
