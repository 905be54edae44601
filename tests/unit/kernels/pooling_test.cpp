// Pooling against its definition, on odd shapes.

#include "common/core/error.h"

#include "tests/support/catch.h"
#include "tests/support/nn_test_support.h"
#include "tests/unit/kernels/kernels_test_support.h"

namespace lockstep {
namespace {

using namespace testing::kernels;
using testing::random_values;
using testing::relative_error;
using testing::TestDevice;
using Values = std::vector<Real>;
using Doubles = std::vector<double>;

// --- Pooling -------------------------------------------------------------------------------------

struct Pooled {
  Values y;
  std::vector<int32_t> where;
  Values dx;
};

Pooled max_pool(const TestDevice& d, const Window2d& g, bool relu, const Values& x,
                const Values& dy) {
  const Tensor y = d.filled(g.output(), 0), dx = d.filled(g.input(), kNaN);
  const IndexTensor where = IndexTensor::empty(d.stream, g.output());
  d.kernels().max_pool2d(d.stream, g, relu, d.put(g.input(), x), y, where);
  d.kernels().max_pool2d_backward(d.stream, g, d.put(g.output(), dy), where, dx);
  return {y.to_host(), where.to_host(), dx.to_host()};
}

/// By walking the windows; backward scatters.
Pooled max_pool_by_definition(const Window2d& g, bool relu, const Values& x, const Values& dy) {
  Pooled out{Values(dy.size()), std::vector<int32_t>(dy.size()), Values(x.size())};
  for (size_t to = 0; to < dy.size(); ++to) {
    const int64_t c = to % g.out_channels, ow = to / g.out_channels % g.out_width;
    const int64_t oh = to / (g.out_channels * g.out_width) % g.out_height;
    const int64_t n = to / (g.out_channels * g.out_width * g.out_height);
    const auto at = [&](int64_t position) {
      const int64_t h = oh * g.stride + position / g.kernel;
      const int64_t w = ow * g.stride + position % g.kernel;
      return ((n * g.in_height + h) * g.in_width + w) * g.in_channels + c;
    };
    int64_t best = 0;
    for (int64_t p = 1; p < g.kernel * g.kernel; ++p) best = x[at(p)] > x[at(best)] ? p : best;
    const bool cut = relu && x[at(best)] <= 0;
    out.y[to] = cut ? 0 : x[at(best)];
    out.where[to] = static_cast<int32_t>(cut ? -1 : best);
    if (!cut) out.dx[at(best)] += dy[to];
  }
  return out;
}

TEST_CASE("Max-pooling finds the largest of each window, and its gradient goes there",
          "[kernels]") {
  const std::vector<Window2d> windows{
      window(2, 6, 8, 3, 3, 2, 2, 0),     // side by side, covering: the tiled backward
      window(41, 8, 8, 8, 8, 2, 2, 0),    // the same, enough for two threads
      window(2, 5, 7, 3, 3, 2, 2, 0),     // a row and a column are left over
      window(37, 9, 7, 9, 9, 3, 2, 0),    // overlapping
      window(1, 6, 5, 2, 2, 2, 1, 0),     // stride 1
      window(1, 15, 16, 1, 1, 15, 1, 0),  // the largest window
      window(2, 11, 11, 1, 1, 2, 4, 0)};  // pixels between the windows
  for (const int threads : {1, 2}) {
    const TestDevice d(threads);
    for (const Window2d& g : windows) {
      const Values x = random_values(g.input(), 1), dy = random_values(g.output(), 2);
      for (const bool relu : {false, true}) {
        INFO(text(g) << ", relu " << relu << ", threads " << threads);
        const Pooled found = max_pool(d, g, relu, x, dy);
        const Pooled expected = max_pool_by_definition(g, relu, x, dy);
        CHECK(found.y == expected.y);
        CHECK(found.where == expected.where);
        CHECK(relative_error(found.dx, expected.dx) <= kRounding);
      }
    }
  }
}

TEST_CASE("In max-pooling the first of equal values wins and NaN beats all", "[kernels]") {
  const TestDevice d;
  const Window2d tiled = window(1, 2, 8, 1, 1, 2, 2, 0);
  const Values x{1, 1, 0, 2, kNaN, 9, -1, -1,  //
                 1, 1, 2, 2, 9,    9, -1, kNaN};
  const Pooled found = max_pool(d, tiled, /*relu=*/true, x, {1, 2, 3, 4});
  CHECK(found.y[0] == 1);
  CHECK(found.y[1] == 2);
  CHECK(std::isnan(found.y[2]));
  CHECK(std::isnan(found.y[3]));
  CHECK(found.where == std::vector<int32_t>{0, 1, 0, 3});
  CHECK(found.dx == Values{1, 0, 0, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4});
  // The same by the body for any window: 3x3 over equal values.
  const Pooled flat = max_pool(d, window(1, 3, 3, 1, 1, 3, 1, 0), false, Values(9, -5), {1});
  CHECK(flat.y == Values{-5});
  CHECK(flat.where == std::vector<int32_t>{0});
  // A window whose maximum is exactly 0 counts as cut by the fused ReLU.
  const Pooled zero = max_pool(d, window(1, 2, 2, 1, 1, 2, 2, 0), true, {-1, 0, -2, -3}, {1});
  CHECK(zero.y == Values{0});
  CHECK(zero.where == std::vector<int32_t>{-1});
  CHECK(zero.dx == Values(4, 0));
}

TEST_CASE("Adaptive average pooling averages PyTorch's ranges, backward spreads them",
          "[kernels]") {
  struct Sizes {
    int64_t batch, height, width, out_height, out_width, channels;
  };
  for (const Sizes& s : {Sizes{2, 7, 5, 3, 2, 3}, Sizes{97, 4, 4, 1, 1, 19},
                         Sizes{1, 5, 6, 5, 6, 2}, Sizes{2, 2, 3, 3, 7, 1}}) {
    const TestDevice d(2);
    const Shape in{s.batch, s.height, s.width, s.channels};
    const Shape out{s.batch, s.out_height, s.out_width, s.channels};
    const Values x = random_values(in, 1), dy = random_values(out, 2);
    Doubles y(dy.size()), dx(x.size());
    for (size_t to = 0; to < dy.size(); ++to) {
      const int64_t c = to % s.channels, ow = to / s.channels % s.out_width;
      const int64_t oh = to / (s.channels * s.out_width) % s.out_height;
      const int64_t n = to / (s.channels * s.out_width * s.out_height);
      std::vector<int64_t> range;
      for (int64_t h = 0; h < s.height; ++h) {
        for (int64_t w = 0; w < s.width; ++w) {
          // Pixel h of `height` and cell oh of `out_height` overlap as intervals of the image.
          const bool rows =
              h * s.out_height < (oh + 1) * s.height && (h + 1) * s.out_height > oh * s.height;
          const bool columns =
              w * s.out_width < (ow + 1) * s.width && (w + 1) * s.out_width > ow * s.width;
          if (rows && columns) range.push_back(((n * s.height + h) * s.width + w) * s.channels + c);
        }
      }
      for (const int64_t from : range) {
        y[to] += double(x[from]) / double(range.size());
        dx[from] += double(dy[to]) / double(range.size());
      }
    }
    INFO(in.text() << " -> " << out.text());
    const Tensor found = d.filled(out, kNaN), slope = d.filled(in, kNaN);
    d.kernels().adaptive_avg_pool2d(d.stream, d.put(in, x), found);
    d.kernels().adaptive_avg_pool2d_backward(d.stream, d.put(out, dy), slope);
    CHECK(relative_error(found.to_host(), y) <= kRounding);
    CHECK(relative_error(slope.to_host(), dx) <= kRounding);
  }
}

}  // namespace
}  // namespace lockstep
