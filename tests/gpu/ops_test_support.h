#pragma once
// How close operations on a GPU come to those of the CPU, and on which sizes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace lockstep::testing::ops {

constexpr double kEqual = 0;
constexpr double kRounding = 1e-6;  // a few operations, which a compiler may fuse
constexpr double kSums = 1e-5;      // sums in another order
constexpr double kClose = 1e-4;     // sums of both signs, other libraries
constexpr Real kNaN = std::numeric_limits<Real>::quiet_NaN();
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

// Around the sizes of a pack, of a warp and of a block, none, and more than one pass of a small
// grid.
inline const std::vector<int64_t> kSizes{0, 1, 2, 3, 4, 5, 31, 33, 257, 1000, 70001};
// With whole packs in a row and without; 160 are more than a block adds up.
inline const std::vector<int64_t> kChannels{1, 3, 4, 31, 33, 160, 257};

/// `values` with NaN, infinities, zeros of both signs at the front, as far as they go.
inline std::vector<Real> with_special(std::vector<Real> values) {
  const std::vector<Real> special{kNaN, kInfinity, -kInfinity, 0, -Real(0)};
  std::copy_n(special.begin(), std::min(special.size(), values.size()), values.begin());
  return values;
}

inline std::vector<Real> with_each(std::vector<Real> values, const std::function<Real(Real)>& f) {
  for (Real& value : values) value = f(value);
  return values;
}

/// Multiples of `step` in [-1, 1]: sums and products of a few of them are exact.
inline std::vector<Real> on_grid(const Shape& shape, Real step, uint32_t seed) {
  return with_each(random_values(shape, seed), [=](Real v) { return std::round(v / step) * step; });
}

}  // namespace lockstep::testing::ops
