#include "common/kernels/cpu/winograd.h"

#include <algorithm>
#include <array>

#include "common/kernels/cpu/launch.h"
#include "common/kernels/cpu/vectors.h"

namespace lockstep::cpu::winograd {
namespace {

constexpr int64_t kPoints = 36;
constexpr int64_t kTilesAtOnce = 256;  // enough rows for the products, few enough for the cache

template <int kRows, int kColumns>
struct Matrix {
  Real at[kRows][kColumns];
  static constexpr int rows = kRows, columns = kColumns;
  constexpr Matrix<kColumns, kRows> transposed() const {
    Matrix<kColumns, kRows> t{};
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) t.at[c][r] = at[r][c];
    }
    return t;
  }
};

// The points are 0, 1, -1, 2, -2 and infinity. What is evaluated there in the forward pass comes
// back by the transposed matrix in the backward pass, and the other way round.
constexpr Matrix<6, 6> kInput{{{4, 0, -5, 0, 1, 0},
                               {0, -4, -4, 1, 1, 0},
                               {0, 4, -4, -1, 1, 0},
                               {0, -2, -1, 2, 1, 0},
                               {0, 2, -1, -2, 1, 0},
                               {0, 4, 0, -5, 0, 1}}};
constexpr Matrix<6, 3> kWeight{{{Real(1) / 4, 0, 0},
                                {Real(-1) / 6, Real(-1) / 6, Real(-1) / 6},
                                {Real(-1) / 6, Real(1) / 6, Real(-1) / 6},
                                {Real(1) / 24, Real(1) / 12, Real(1) / 6},
                                {Real(1) / 24, Real(-1) / 12, Real(1) / 6},
                                {0, 0, 1}}};
constexpr Matrix<4, 6> kOutput{
    {{1, 1, 1, 1, 1, 0}, {0, 1, -1, 2, -2, 0}, {0, 1, 1, 4, 4, 0}, {0, 1, -1, 8, -8, 1}}};
constexpr auto kOutputGradient = kOutput.transposed();
constexpr auto kWeightGradient = kWeight.transposed();

/// y = m x for one row or column of a tile, whose elements are `step` apart. In loops that are
/// unrolled completely the compiler knows the numbers of m: zeros cost nothing.
template <const auto& m>
inline void multiply(const Lanes* x, int64_t x_step, Lanes* y, int64_t y_step) {
#pragma GCC unroll 6
  for (int r = 0; r < m.rows; ++r) {
    Lanes sum{};
#pragma GCC unroll 6
    for (int c = 0; c < m.columns; ++c) {
      if (m.at[r][c] != 0) sum += m.at[r][c] * x[c * x_step];
    }
    y[r * y_step] = sum;
  }
}

/// y = m x m^T, tiles row by row.
template <const auto& m>
inline void transform(const Lanes* x, Lanes* y) {
  Lanes half[m.rows * m.columns];
#pragma GCC unroll 6
  for (int c = 0; c < m.columns; ++c) multiply<m>(x + c, m.columns, half + c, m.columns);
#pragma GCC unroll 6
  for (int r = 0; r < m.rows; ++r) multiply<m>(half + r * m.columns, 1, y + r * m.rows, 1);
}

/// Images cut into tiles of `side` pixels that begin every four pixels, the first at -padding.
template <class Pixel>
struct Tiles {
  Pixel* images;
  int64_t height, width, channels, padding, down, across;

  int64_t per_image() const { return down * across; }
  /// Where the pixels of a tile are; `outside` for those beyond the image.
  template <int64_t side>
  std::array<Pixel*, side * side> pixels(int64_t tile, Pixel* outside) const {
    std::array<Pixel*, side * side> at;
    const int64_t image = tile / per_image(), row = tile % per_image() / across;
    const int64_t top = row * kTile - padding, left = tile % across * kTile - padding;
    for (int64_t i = 0; i < side * side; ++i) {
      const int64_t h = top + i / side, w = left + i % side;
      const bool inside = h >= 0 && h < height && w >= 0 && w < width;
      at[i] = inside ? images + ((image * height + h) * width + w) * channels : outside;
    }
    return at;
  }
};

/// The matrices of the 36 points, one after another. The gap keeps them from falling on the same
/// lines of the cache.
struct Points {
  Real* data;
  int64_t rows, columns;
  int64_t stride() const { return stride(rows, columns); }
  Real* at(int64_t point, int64_t row = 0) const { return data + point * stride() + row * columns; }
  Real* end() const { return data + kPoints * stride(); }
  static int64_t stride(int64_t rows, int64_t columns) { return rows * columns + 16; }
};

/// points[., tile, c] = m (tile) m^T for tiles first, first + 1, ...
template <const auto& m>
void tiles_to_points(const Tiles<const Real>& tiles, int64_t first, const Points& points) {
  const std::vector<Real> zeros(size_t(tiles.channels), Real(0));
  share_out(points.rows, kPoints * tiles.channels, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto from = tiles.template pixels<m.columns>(first + row, zeros.data());
      for (int64_t c = 0; c < tiles.channels; c += kLanes) {
        Lanes x[m.columns * m.columns], y[kPoints];
        for (size_t i = 0; i < from.size(); ++i) x[i] = load(from[i] + c);
        transform<m>(x, y);
        for (int64_t point = 0; point < kPoints; ++point)
          store(y[point], points.at(point, row) + c);
      }
    }
  });
}

/// The way back: the pixels that exist, plus `bias` where there is one.
void points_to_tiles(const Points& points, const Tiles<Real>& tiles, int64_t first,
                     const Real* bias) {
  share_out(points.rows, kPoints * tiles.channels, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto to = tiles.pixels<kTile>(first + row, nullptr);
      for (int64_t c = 0; c < tiles.channels; c += kLanes) {
        Lanes x[kPoints], y[kTile * kTile];
        for (int64_t point = 0; point < kPoints; ++point)
          x[point] = load(points.at(point, row) + c);
        transform<kOutput>(x, y);
        const Lanes shift = bias == nullptr ? Lanes{} : load(bias + c);
        for (size_t i = 0; i < to.size(); ++i) {
          if (to[i] != nullptr) store(y[i] + shift, to[i] + c);
        }
      }
    }
  });
}

/// OHWI weights to points[., o, i]; `turned` by half a turn for the input's gradient.
void weights_to_points(const Window2d& g, const Real* weight, bool turned, const Points& points) {
  share_out(g.out_channels, kPoints * g.in_channels, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) {
      for (int64_t c = 0; c < g.in_channels; c += kLanes) {
        Lanes x[9], y[kPoints];
        for (int64_t i = 0; i < 9; ++i) {
          x[turned ? 8 - i : i] = load(weight + (o * 9 + i) * g.in_channels + c);
        }
        transform<kWeight>(x, y);
        for (int64_t point = 0; point < kPoints; ++point) store(y[point], points.at(point, o) + c);
      }
    }
  });
}

/// Adds the gradient of the weights, given at the points, to dweight.
void add_points_to_weights(const Window2d& g, const Points& points, Real* dweight) {
  share_out(g.out_channels, kPoints * g.in_channels, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) {
      for (int64_t c = 0; c < g.in_channels; c += kLanes) {
        Lanes x[kPoints], y[9];
        for (int64_t point = 0; point < kPoints; ++point) x[point] = load(points.at(point, o) + c);
        transform<kWeightGradient>(x, y);
        for (int64_t i = 0; i < 9; ++i) {
          Real* to = dweight + (o * 9 + i) * g.in_channels + c;
          store(load(to) + y[i], to);
        }
      }
    }
  });
}

/// dbias += the sum of all pixels of dy. At the point (1, 1) a tile is the sum of its pixels.
void add_sums(const Points& dy, Real* dbias) {
  constexpr int64_t kOneOne = 7;
  for (int64_t row = 0; row < dy.rows; ++row) {
    for (int64_t c = 0; c < dy.columns; ++c) dbias[c] += dy.at(kOneOne, row)[c];
  }
}

/// Calls f(first tile, tiles) for pieces of all tiles.
template <class F>
void for_pieces(int64_t tiles, F f) {
  for (int64_t first = 0; first < tiles; first += kTilesAtOnce) {
    f(first, std::min(kTilesAtOnce, tiles - first));
  }
}

/// A convolution of x with weights that are at the points already, [out, in] or `transposed`.
void convolve(const Tiles<const Real>& x, const Points& weights, bool transposed, const Real* bias,
              const Tiles<Real>& y, int64_t tiles, Real* workspace, Engine& engine) {
  for_pieces(tiles, [&](int64_t first, int64_t count) {
    const Points in{workspace, count, x.channels}, out{in.end(), count, y.channels};
    tiles_to_points<kInput>(x, first, in);
    const MatMul shape{.m = count,
                       .n = y.channels,
                       .k = x.channels,
                       .transpose_a = false,
                       .transpose_b = !transposed,
                       .accumulate = false};
    for (int64_t p = 0; p < kPoints; ++p) engine.matmul(shape, in.at(p), weights.at(p), out.at(p));
    points_to_tiles(out, y, first, bias);
  });
}

}  // namespace

size_t workspace_bytes(const Window2d& g) {
  const int64_t rows = kTilesAtOnce;
  return sizeof(Real) * kPoints *
         (Points::stride(g.out_channels, g.in_channels) + Points::stride(rows, g.in_channels) +
          Points::stride(rows, g.out_channels));
}

void conv2d(const Window2d& g, const Real* x, const Real* weight, const Real* bias, Real* y,
            void* workspace, Engine& engine) {
  const int64_t down = tiles_along(g.out_height), across = tiles_along(g.out_width);
  const Points weights{static_cast<Real*>(workspace), g.out_channels, g.in_channels};
  weights_to_points(g, weight, false, weights);
  convolve({x, g.in_height, g.in_width, g.in_channels, g.padding, down, across}, weights, false,
           bias, {y, g.out_height, g.out_width, g.out_channels, 0, down, across},
           g.batch * down * across, weights.end(), engine);
}

void conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight, Real* dx,
                           void* workspace, Engine& engine) {
  const int64_t down = tiles_along(g.in_height), across = tiles_along(g.in_width);
  const Points weights{static_cast<Real*>(workspace), g.out_channels, g.in_channels};
  weights_to_points(g, weight, true, weights);
  convolve({dy, g.out_height, g.out_width, g.out_channels, 2 - g.padding, down, across}, weights,
           true, nullptr, {dx, g.in_height, g.in_width, g.in_channels, 0, down, across},
           g.batch * down * across, weights.end(), engine);
}

void conv2d_backward_parameters(const Window2d& g, const Real* x, const Real* dy, Real* dweight,
                                Real* dbias, void* workspace, Engine& engine) {
  const int64_t down = tiles_along(g.out_height), across = tiles_along(g.out_width);
  const Tiles<const Real> in{x, g.in_height, g.in_width, g.in_channels, g.padding, down, across};
  const Tiles<const Real> out{dy, g.out_height, g.out_width, g.out_channels, 0, down, across};
  const Points weights{static_cast<Real*>(workspace), g.out_channels, g.in_channels};
  for_pieces(g.batch * down * across, [&](int64_t first, int64_t count) {
    const Points x_points{weights.end(), count, g.in_channels};
    const Points dy_points{x_points.end(), count, g.out_channels};
    tiles_to_points<kInput>(in, first, x_points);
    tiles_to_points<kOutputGradient>(out, first, dy_points);
    const MatMul shape{.m = g.out_channels,
                       .n = g.in_channels,
                       .k = count,
                       .transpose_a = true,
                       .transpose_b = false,
                       .accumulate = first > 0};
    for (int64_t p = 0; p < kPoints; ++p) {
      engine.matmul(shape, dy_points.at(p), x_points.at(p), weights.at(p));
    }
    add_sums(dy_points, dbias);
  });
  add_points_to_weights(g, weights, dweight);
}

}  // namespace lockstep::cpu::winograd
