#pragma once
// Real copies of numbers of 16 bits, for the engines of CPU devices: these know Real numbers only.

#include <initializer_list>
#include <utility>

#include "common/core/element_type.h"
#include "common/kernels/cpu/engine.h"

namespace lockstep::cpu {

/// The numbers that an operation on numbers T gives the engine. For T = Real these are the numbers
/// themselves, else copies, one after another in a workspace.
template <class T>
class RealCopies {
  static constexpr bool kCopies = sizeof(T) != sizeof(Real);

 public:
  /// `elements`: the number of elements of each copy.
  RealCopies(Workspace& memory, std::initializer_list<int64_t> elements) {
    int64_t all = 0;
    for (const int64_t one : elements) all += aligned(one);
    if (kCopies) next_ = static_cast<Real*>(memory.at_least(size_t(all) * sizeof(Real)));
  }

  /// Room for n numbers that the engine writes; with Real, `to` itself.
  Real* room(T* to, int64_t n) {
    if constexpr (kCopies) {
      return std::exchange(next_, next_ + aligned(n));
    } else {
      return to;
    }
  }
  /// The n numbers in the form that the engine reads.
  const Real* widened(const T* from, int64_t n) {
    if constexpr (kCopies) {
      Real* const copy = room(nullptr, n);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) copy[i] = from[i];
      return copy;
    } else {
      return from;
    }
  }
  /// Rounds n numbers, which the engine has written, to numbers T.
  static void round(const Real* written, T* to, int64_t n) {
    if constexpr (kCopies) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) to[i] = float(written[i]);
    }
  }
  /// Rounds n numbers, which the engine has written, to T. Adds them to n numbers, Real or T.
  template <class To>
  static void add_rounded(const Real* written, To* to, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) to[i] = Real(to[i]) + Real(T(written[i]));
  }

 private:
  static int64_t aligned(int64_t elements) { return (elements + 15) / 16 * 16; }  // a cache line

  Real* next_ = nullptr;
};

}  // namespace lockstep::cpu
