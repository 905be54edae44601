#pragma once
// Memory's full width: a thread moves packs of neighbours, up to 16 bytes in one instruction, and
// runs the body on each of them.
//
//   memory    x: ... [ x4 x5 x6 x7 ] ...      one load of 16 bytes
//   registers        body(0) ... body(3)      a copy of the body whose arrays lead to the pack
//   memory    y: ... [ y4 y5 y6 y7 ] ...      one store of 16 bytes
//
// All packs are loaded before the first of them is stored, so an output may be an input, too.
// Loads are plain ones (no ld.global.nc), for the same reason.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/kernels/bodies/portable.h"

namespace lockstep::cuda {

using bodies::Members;

constexpr int kWidest = 16;  // bytes of a load or store

/// N neighbours, N a power of two.
template <class T, int N>
struct alignas(N * sizeof(T) < kWidest ? N * sizeof(T) : kWidest) Pack {
  T values[N];
};

/// What a body's array is made of: const float for `const float* AddBias::bias`.
template <class Body, class T>
T& element_of(T* Body::*);
template <auto member>
using ElementOf = std::remove_reference_t<decltype(element_of(member))>;

/// Elements of a pack: as many of the narrowest array fill 16 bytes. 1 for a body without `Arrays`.
template <auto... member>
constexpr int pack_size(Members<member...>) {
  return std::max({1, kWidest / int(sizeof(ElementOf<member>))...});
}
template <class Body>
constexpr int kPackSize = [] {
  if constexpr (requires { typename Body::Arrays; }) {
    return pack_size(typename Body::Arrays());
  } else {
    return 1;
  }
}();

template <class Pack, class T>
__host__ __device__ inline bool may_begin_at(const T* place) {
  return reinterpret_cast<uintptr_t>(place) % alignof(Pack) == 0;
}

/// True if packs of N may begin at element i of each of these arrays.
template <int N, class Body, auto... member>
bool packs_begin_at(int64_t i, const Body& body, Members<member...>) {
  return (may_begin_at<Pack<ElementOf<member>, N>>(body.*member + i) && ...);
}

/// N neighbours from memory: in one piece if a pack may begin there.
template <int N, bool kAligned, class T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* from) {
  if constexpr (kAligned) {
    return *reinterpret_cast<const Pack<T, N>*>(from);
  } else {
    Pack<T, N> pack;
    LOCKSTEP_UNROLL
    for (int k = 0; k < N; ++k) pack.values[k] = from[k];
    return pack;
  }
}

/// Calls use(body) while the arrays of `body` lead to packs of N that begin at element i. What
/// use() leaves there is stored, but for arrays of constants. The compiler leaves out loads of what
/// is overwritten.
template <int N, bool kAligned, class Body, class Use>
__device__ __forceinline__ void with_packs(Members<>, Body& body, int64_t /*i*/, Use use) {
  use(body);
}
template <int N, bool kAligned, auto first, auto... rest, class Body, class Use>
__device__ __forceinline__ void with_packs(Members<first, rest...>, Body& body, int64_t i,
                                           Use use) {
  using T = std::remove_const_t<ElementOf<first>>;
  auto* const memory = body.*first + i;
  auto pack = load_pack<N, kAligned, T>(memory);
  body.*first = pack.values;
  with_packs<N, kAligned>(Members<rest...>(), body, i, use);
  if constexpr (!std::is_const_v<ElementOf<first>>) {
    static_assert(kAligned, "only loads may begin anywhere");
    *reinterpret_cast<Pack<T, N>*>(memory) = pack;
  }
}

// --- [0, n), most of it in packs ----------------------------------------------------------------

/// The elements of flat arrays. These may begin anywhere, if all of them do so at the same distance
/// from where a pack may begin: then `head` elements come first, then packs, and the last elements.
template <class Body>
struct Split {
  static constexpr int kSize = kPackSize<Body>;
  int64_t n, head, packs;
  __host__ __device__ int64_t alone() const { return n - packs * kSize; }
  /// The number of the k-th element that is in no pack.
  __device__ int64_t element(int64_t k) const { return k < head ? k : k + packs * kSize; }
  /// The number of a pack's first element.
  __device__ int64_t first_of(int64_t pack) const { return head + pack * kSize; }
};

template <class Body>
Split<Body> split(int64_t n, const Body& body) {
  constexpr int kSize = kPackSize<Body>;
  if constexpr (kSize > 1) {
    for (int64_t head = 0; head < kSize && head + kSize <= n; ++head) {
      if (packs_begin_at<kSize>(head, body, typename Body::Arrays())) {
        return {n, head, (n - head) / kSize};
      }
    }
  }
  return {n, n, 0};
}

/// call(body, k) for the elements of the packs that begin at the elements `first...`. They are
/// numbers k of the body's arrays then. All packs are loaded before the first of them is used.
template <class Body, class Call, class... Firsts>
__device__ __forceinline__ void each_of_packs(Body body, Call call, int64_t first,
                                              Firsts... others) {
  constexpr int kSize = kPackSize<Body>;
  const Body in_memory = body;
  with_packs<kSize, true>(typename Body::Arrays(), body, first, [&](const Body& here) {
    if constexpr (sizeof...(others) > 0) each_of_packs(in_memory, call, others...);
    LOCKSTEP_UNROLL
    for (int k = 0; k < kSize; ++k) call(here, k);
  });
}

// --- Rows ---------------------------------------------------------------------------------------

/// True if rows of so many features are whole packs of N.
template <int N, class Body>
bool rows_are_packs(int64_t rows, int64_t features, const Body& body) {
  if constexpr (requires { typename Body::FeatureArrays; }) {
    if (!packs_begin_at<N>(0, body, typename Body::FeatureArrays())) return false;
  }
  return features % N == 0 && rows * (features / N) < std::numeric_limits<int32_t>::max() &&
         packs_begin_at<N>(0, body, typename Body::Arrays());
}

/// body(i, row, feature) for the elements of the pack that begins at element i.
template <int N, class Body>
__device__ __forceinline__ void run_row_pack(Body body, int64_t i, int64_t row, int64_t feature) {
  with_packs<N, true>(typename Body::Arrays(), body, i, [&](Body& here) {
    if constexpr (requires { typename Body::FeatureArrays; }) {
      with_packs<N, true>(typename Body::FeatureArrays(), here, feature, [&](const Body& both) {
        LOCKSTEP_UNROLL
        for (int k = 0; k < N; ++k) both(k, row, k);
      });
    } else {
      LOCKSTEP_UNROLL
      for (int k = 0; k < N; ++k) here(k, row, feature + k);
    }
  });
}

}  // namespace lockstep::cuda
