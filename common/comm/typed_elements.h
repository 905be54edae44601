#pragma once
// Elements as numbers of their type, for work on host memory.

#include <algorithm>

#include "common/comm/communicator.h"

namespace lockstep {

/// Calls work(T()) with the type of the elements.
template <class Work>
void with_type(ElementType type, Work work) {
  switch (type) {
    // NOLINTNEXTLINE(bugprone-branch-clone): each branch calls it with another type.
    case ElementType::f32:
      return work(float());
    case ElementType::f64:
      return work(double());
    case ElementType::i64:
      return work(int64_t());
  }
}

template <class T>
T* numbers_of(const Elements& x) {
  return static_cast<T*>(x.data);
}

/// Turns a sum over `world_size` ranks into their average, if that was asked for.
template <class T>
void finish_sum(T* x, int64_t count, Reduction reduction, int world_size) {
  if (reduction == Reduction::sum) return;
  const T factor = T(1) / T(world_size);
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

/// Part `number` of a sum over so many ranks.
struct SummedPart {
  int number, ranks;
};

/// sum = from(p+1) + from(p+2) + ... + from(p) for part p, in this order; n numbers each.
template <class T, class From>
void add_up(T* sum, int64_t n, From from, SummedPart part, Reduction reduction) {
  const T* a = from(part.number + 1);
  if (part.ranks == 1) std::copy_n(a, n, sum);
  for (int k = 2; k <= part.ranks; ++k, a = sum) {
    const T* const b = from(part.number + k);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];
  }
  finish_sum(sum, n, reduction, part.ranks);
}

}  // namespace lockstep
