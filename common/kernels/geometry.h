#pragma once
// Sizes of the windowed operations, worked out once and shared by all backends.

#include "common/core/tensor.h"

namespace lockstep {

/// A square window that slides over [batch, in_height, in_width, in_channels] and gives
/// [batch, out_height, out_width, out_channels]. Pooling keeps the channels.
struct Window2d {
  int64_t batch, in_height, in_width, in_channels;
  int64_t out_height, out_width, out_channels;
  int64_t kernel, stride, padding;

  Shape input() const { return {batch, in_height, in_width, in_channels}; }
  Shape output() const { return {batch, out_height, out_width, out_channels}; }
  /// Convolution weights, O,H,W,I.
  Shape weight() const { return {out_channels, kernel, kernel, in_channels}; }
  /// Multiplications and additions of one convolution, forward. Backward needs as many for the
  /// weights, and again for the input.
  double flops() const {
    return 2.0 * batch * out_height * out_width * out_channels * kernel * kernel * in_channels;
  }
  /// Libraries take no empty batch.
  bool empty() const { return batch == 0; }
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 sees a 0 in the comparison.
  friend auto operator<=>(const Window2d&, const Window2d&) = default;
};

/// Output extents are floor((in + 2 padding - kernel) / stride) + 1, as in torch.nn.Conv2d.
/// Throws BadInput, naming `layer`, if x is not NHWC with the right channels or too small.
Window2d make_window(const std::string& layer, const Shape& x, int64_t in_channels,
                     int64_t out_channels, int64_t kernel, int64_t stride, int64_t padding);

/// C[m,n] = op(A) op(B) + beta C, row major; op transposes where asked: A is then stored as [k,m],
/// B as [n,k]. beta is 0 or 1.
struct MatMul {
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  bool accumulate;  // beta = 1
  /// No products to add up: C becomes beta C.
  bool empty() const { return m == 0 || n == 0 || k == 0; }
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 sees a 0 in the comparison.
  friend auto operator<=>(const MatMul&, const MatMul&) = default;
};

}  // namespace lockstep
