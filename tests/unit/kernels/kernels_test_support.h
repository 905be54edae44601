#pragma once
// How exact kernels are, and what else their tests share.

#include <fmt/format.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/nn_test_support.h"

namespace lockstep::testing::kernels {

// A few roundings, and sums of some thousand terms.
constexpr double kRounding = kDouble ? 1e-14 : 1e-6;
constexpr double kSums = kDouble ? 1e-12 : 1e-5;
constexpr Real kNaN = std::numeric_limits<Real>::quiet_NaN();
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

inline std::vector<Real> with_each(const std::vector<Real>& x, const std::function<Real(Real)>& f) {
  std::vector<Real> y = x;
  for (Real& value : y) value = f(value);
  return y;
}

inline Window2d window(int64_t batch, int64_t height, int64_t width, int64_t in, int64_t out,
                       int64_t kernel, int64_t stride, int64_t padding) {
  return make_window("test", {batch, height, width, in}, in, out, kernel, stride, padding);
}

inline std::string text(const Window2d& g) {
  return fmt::format("{} -> {}, kernel {}, stride {}, padding {}", g.input().text(),
                     g.output().text(), g.kernel, g.stride, g.padding);
}

}  // namespace lockstep::testing::kernels
