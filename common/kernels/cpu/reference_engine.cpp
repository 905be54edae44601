// The readable engine: convolution and matrix product as loops.
//
// Output channels are walked in blocks of one vector register. A copy of the weights in which the
// block's channels are side by side lets the compiler keep the block's sums in that register.

#include <algorithm>
#include <vector>

#include "common/kernels/cpu/engine.h"
#include "common/kernels/cpu/launch.h"

namespace lockstep::cpu {
namespace {

constexpr int64_t kBlock = 64 / sizeof(Real);

int64_t blocks_of(int64_t channels) { return (channels + kBlock - 1) / kBlock; }

/// packed[block][kh][kw][from][lane]: the weight from input channel `from` to output channel
/// block * kBlock + lane; 0 after the last channel. `backward` swaps the roles of the channels.
void pack_weights(const Window2d& g, const Real* weight, bool backward, Real* packed) {
  const int64_t from_channels = backward ? g.out_channels : g.in_channels;
  const int64_t to_channels = backward ? g.in_channels : g.out_channels;
  for (int64_t block = 0; block < blocks_of(to_channels); ++block) {
    for (int64_t tap = 0; tap < g.kernel * g.kernel; ++tap) {
      for (int64_t from = 0; from < from_channels; ++from) {
        for (int64_t lane = 0; lane < kBlock; ++lane) {
          const int64_t to = block * kBlock + lane;
          const int64_t o = backward ? from : to, i = backward ? to : from;
          *packed++ = to < to_channels ? weight[(o * g.kernel * g.kernel + tap) * g.in_channels + i]
                                       : Real(0);
        }
      }
    }
  }
}

/// Pixels side by side that are computed together: the sums of one need not wait for those of
/// another, so that the processor has several multiply-adds under way.
constexpr int64_t kPixels = 4;

/// sums[p][lane] += sum over c of pixels[p][c] * weights[c][lane]
inline void add_products(const Real* const (&pixels)[kPixels], int64_t channels,
                         const Real* weights, Real (&sums)[kPixels][kBlock]) {
  Real block[kPixels][kBlock];
  std::copy(sums[0], sums[0] + kPixels * kBlock, block[0]);
  for (int64_t c = 0; c < channels; ++c) {
#pragma GCC unroll 4
    for (int64_t p = 0; p < kPixels; ++p) {
#pragma omp simd
      for (int64_t lane = 0; lane < kBlock; ++lane)
        block[p][lane] += pixels[p][c] * weights[c * kBlock + lane];
    }
  }
  std::copy(block[0], block[0] + kPixels * kBlock, sums[0]);
}

/// Row h of image n with `padding` pixels of zeros at both sides, so that a window's row is in one
/// piece wherever the window is: [width + 2 padding][channels]; zeros for a row outside.
void copy_padded_row(const Window2d& g, const Real* x, int64_t n, int64_t h, Real* to) {
  const int64_t side = g.padding * g.in_channels, row = g.in_width * g.in_channels;
  if (h < 0 || h >= g.in_height) {
    std::fill(to, to + row + 2 * side, Real(0));
    return;
  }
  to = std::fill_n(to, side, Real(0));
  to = std::copy_n(x + (n * g.in_height + h) * row, row, to);
  std::fill_n(to, side, Real(0));
}

int64_t padded_row_size(const Window2d& g) { return (g.in_width + 2 * g.padding) * g.in_channels; }

class ReferenceEngine final : public Engine {
 public:
  explicit ReferenceEngine(CpuStream& stream) : workspace_(stream) {}

  void conv2d(const Window2d& g, const Real* x, const Real* weight, const Real* bias,
              Real* y) override {
    const Packed packed = pack(g, weight, /*backward=*/false);
    share_out(g.batch * g.out_height, g.out_width * g.out_channels,
              [&](int64_t begin, int64_t end) {
                std::vector<Real> window(g.kernel * padded_row_size(g));
                for (int64_t row = begin; row < end; ++row) {
                  for (int64_t kh = 0; kh < g.kernel; ++kh) {
                    copy_padded_row(g, x, row / g.out_height,
                                    row % g.out_height * g.stride - g.padding + kh,
                                    &window[kh * padded_row_size(g)]);
                  }
                  output_row(g, window.data(), packed.weights, bias,
                             y + row * g.out_width * g.out_channels);
                }
              });
  }

  void conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight,
                             Real* dx) override {
    const Packed packed = pack(g, weight, /*backward=*/true);
    share_out(g.batch * g.in_height, g.in_width * g.in_channels, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t w = 0; w < g.in_width; w += kPixels) {
          input_pixels(g, dy, packed, row / g.in_height, row % g.in_height, w,
                       dx + (row * g.in_width + w) * g.in_channels);
        }
      }
    });
  }

  /// dweight[o][kh][kw][i] += sum over pixels of dy[pixel][o] x[pixel moved by (kh, kw)][i]
  void conv2d_backward_parameters(const Window2d& g, const Real* x, const Real* dy, Real* dweight,
                                  Real* dbias) override {
    const int64_t taps = g.kernel * g.kernel, blocks = blocks_of(g.out_channels);
    Real* sums = static_cast<Real*>(
        workspace_.at_least(sizeof(Real) * blocks * taps * g.in_channels * kBlock));
    const int64_t kernel_row = g.kernel * g.in_channels;
    share_out(blocks * g.kernel, g.batch * g.out_height * g.out_width,
              [&](int64_t begin, int64_t end) {
                for (int64_t item = begin; item < end; ++item) {
                  weight_row(g, x, dy, item / g.kernel, item % g.kernel,
                             sums + item * kernel_row * kBlock);
                }
              });
    for (int64_t o = 0; o < g.out_channels; ++o) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        const Real* sum = sums + (o / kBlock * taps + tap) * g.in_channels * kBlock + o % kBlock;
        Real* to = dweight + (o * taps + tap) * g.in_channels;
        for (int64_t i = 0; i < g.in_channels; ++i) to[i] += sum[i * kBlock];
      }
    }
    const int64_t pixels = g.batch * g.out_height * g.out_width;
    for (int64_t o = 0; o < g.out_channels; ++o) {
      double sum = 0;
      for (int64_t pixel = 0; pixel < pixels; ++pixel) sum += dy[pixel * g.out_channels + o];
      dbias[o] += Real(sum);
    }
  }

  void matmul(const MatMul& s, const Real* a, const Real* b, Real* c) override {
    share_out(s.m, s.n * s.k, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        Real* row = c + i * s.n;
        if (!s.accumulate) std::fill(row, row + s.n, Real(0));
        for (int64_t p = 0; p < s.k; ++p) {
          const Real left = s.transpose_a ? a[p * s.m + i] : a[i * s.k + p];
          const int64_t stride = s.transpose_b ? s.k : 1;
          const Real* right = s.transpose_b ? b + p : b + p * s.n;
#pragma omp simd
          for (int64_t j = 0; j < s.n; ++j) row[j] += left * right[j * stride];
        }
      }
    });
  }

 private:
  /// The weights of a convolution, then one pixel of zeros.
  struct Packed {
    const Real* weights;
    const Real* zeros;
  };

  Packed pack(const Window2d& g, const Real* weight, bool backward) {
    const int64_t from = backward ? g.out_channels : g.in_channels;
    const int64_t blocks = blocks_of(backward ? g.in_channels : g.out_channels);
    const int64_t elements = blocks * g.kernel * g.kernel * from * kBlock;
    Real* packed = static_cast<Real*>(workspace_.at_least(sizeof(Real) * (elements + from)));
    pack_weights(g, weight, backward, packed);
    std::fill(packed + elements, packed + elements + from, Real(0));
    return {packed, packed + elements};
  }

  /// y[ow][o] = bias[o] + sum over kh, kw and i of window[kh][ow * stride + kw][i] w
  static void output_row(const Window2d& g, const Real* window, const Real* weights,
                         const Real* bias, Real* y) {
    const int64_t kernel_row = g.kernel * g.in_channels;
    for (int64_t first = 0; first < g.out_channels; first += kBlock) {
      const int64_t count = std::min(kBlock, g.out_channels - first);
      for (int64_t ow = 0; ow < g.out_width; ow += kPixels) {
        Real sums[kPixels][kBlock] = {};
        for (auto& sum : sums) std::copy(bias + first, bias + first + count, sum);
        for (int64_t kh = 0; kh < g.kernel; ++kh) {
          const Real* pixels[kPixels];
          for (int64_t p = 0; p < kPixels; ++p) {
            const int64_t column = std::min(ow + p, g.out_width - 1) * g.stride;
            pixels[p] = window + kh * padded_row_size(g) + column * g.in_channels;
          }
          add_products(pixels, kernel_row, weights + kh * kernel_row * kBlock, sums);
        }
        store(sums, std::min(kPixels, g.out_width - ow), count, y + ow * g.out_channels + first,
              g.out_channels);
      }
      weights += g.kernel * kernel_row * kBlock;
    }
  }

  /// dx[h][w][i] = sum over the outputs that (h, w) took part in, their taps, and o, of dy w, for
  /// kPixels columns from `first_w` on, as far as the row has them.
  static void input_pixels(const Window2d& g, const Real* dy, Packed packed, int64_t n, int64_t h,
                           int64_t first_w, Real* dx) {
    const int64_t tap_size = g.out_channels * kBlock;
    for (int64_t first = 0; first < g.in_channels; first += kBlock) {
      Real sums[kPixels][kBlock] = {};
      for (int64_t kh = 0; kh < g.kernel; ++kh) {
        const int64_t up = h + g.padding - kh, oh = up / g.stride;
        for (int64_t kw = 0; kw < g.kernel; ++kw, packed.weights += tap_size) {
          if (up < 0 || up % g.stride != 0 || oh >= g.out_height) continue;
          const Real* row = dy + (n * g.out_height + oh) * g.out_width * g.out_channels;
          const Real* pixels[kPixels];
          for (int64_t p = 0; p < kPixels; ++p) {
            const int64_t left = first_w + p + g.padding - kw, ow = left / g.stride;
            const bool none = left < 0 || left % g.stride != 0 || ow >= g.out_width;
            pixels[p] = none ? packed.zeros : row + ow * g.out_channels;
          }
          add_products(pixels, g.out_channels, packed.weights, sums);
        }
      }
      store(sums, std::min(kPixels, g.in_width - first_w), std::min(kBlock, g.in_channels - first),
            dx + first, g.in_channels);
    }
  }

  /// to[p][lane] = sums[p][lane] for the first `pixels` and `lanes`; `channels` apart in `to`.
  static void store(const Real (&sums)[kPixels][kBlock], int64_t pixels, int64_t lanes, Real* to,
                    int64_t channels) {
    for (int64_t p = 0; p < pixels; ++p) std::copy(sums[p], sums[p] + lanes, to + p * channels);
  }

  /// sums[kw][i][lane] = sum over pixels of x[pixel moved by (kh, kw)][i] dy[pixel][block's lane]
  static void weight_row(const Window2d& g, const Real* x, const Real* dy, int64_t block,
                         int64_t kh, Real* sums) {
    const int64_t kernel_row = g.kernel * g.in_channels, first = block * kBlock;
    const int64_t lanes = std::min(kBlock, g.out_channels - first);
    std::fill(sums, sums + kernel_row * kBlock, Real(0));
    std::vector<Real> x_row(padded_row_size(g)), slopes(g.out_width * kBlock);
    for (int64_t row = 0; row < g.batch * g.out_height; ++row) {
      const int64_t h = row % g.out_height * g.stride - g.padding + kh;
      if (h < 0 || h >= g.in_height) continue;
      copy_padded_row(g, x, row / g.out_height, h, x_row.data());
      for (int64_t ow = 0; ow < g.out_width; ++ow) {
        const Real* from = dy + (row * g.out_width + ow) * g.out_channels + first;
        std::copy(from, from + lanes, &slopes[ow * kBlock]);
      }
      int64_t i = 0;
      for (; i + kPixels <= kernel_row; i += kPixels)
        add_row<kPixels>(g, &x_row[i], slopes, sums + i * kBlock);
      for (; i < kernel_row; ++i) add_row<1>(g, &x_row[i], slopes, sums + i * kBlock);
    }
  }

  /// sums[i][lane] += sum over ow of x[ow * stride][i] slopes[ow][lane], for `count` values i. A
  /// register keeps each sum while it grows.
  template <int count>
  static void add_row(const Window2d& g, const Real* x, const std::vector<Real>& slopes,
                      Real* sums) {
    Real block[count][kBlock];
    std::copy(sums, sums + count * kBlock, block[0]);
    for (int64_t ow = 0; ow < g.out_width; ++ow, x += g.stride * g.in_channels) {
      const Real* slope = &slopes[ow * kBlock];
#pragma GCC unroll 4
      for (int i = 0; i < count; ++i) {
#pragma omp simd
        for (int64_t lane = 0; lane < kBlock; ++lane) block[i][lane] += x[i] * slope[lane];
      }
    }
    std::copy(block[0], block[0] + count * kBlock, sums);
  }

  Workspace workspace_;
};

}  // namespace

EngineMaker reference_engine() {
  return {"reference", [](CpuStream& stream) -> std::unique_ptr<Engine> {
            return std::make_unique<ReferenceEngine>(stream);
          }};
}

}  // namespace lockstep::cpu
