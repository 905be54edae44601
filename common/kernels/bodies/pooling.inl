#pragma once
// One call per pixel and channel: operator()(n, h, w, c). Arrays are NHWC.

#include <type_traits>

#include "common/core/sixteen_bits.h"
#include "common/kernels/bodies/portable.h"
#include "common/kernels/geometry.h"

namespace lockstep::bodies {

// Positions are as wide as the values: loops over numbers of different widths vectorise badly.
template <class T>
using Position = std::conditional_t<sizeof(T) == 2, int16_t, int32_t>;
constexpr int kNoMaximum = -1;  // the fused ReLU cut this window off

/// Over output pixels. The first of equal values wins and NaN beats all, as in PyTorch. kKernel is
/// the window's size where it is known to the compiler, which then vectorises over channels; 0:
/// any.
template <class T, int kKernel>
struct MaxPool2d {
  Window2d g;
  bool relu;
  const T* x;
  T* y;
  Position<T>* where;
  LOCKSTEP_BODY void operator()(int64_t n, int64_t oh, int64_t ow, int64_t c) const {
    const int kernel = kKernel > 0 ? kKernel : int(g.kernel);
    const int64_t row = g.in_width * g.in_channels;
    const T* window =
        x + (n * g.in_height + oh * g.stride) * row + ow * g.stride * g.in_channels + c;
    Real best = window[0];
    int position = 0;
    LOCKSTEP_UNROLL
    for (int kh = 0; kh < kernel; ++kh) {
      LOCKSTEP_UNROLL
      for (int kw = 0; kw < kernel; ++kw) {
        const Real value = window[kh * row + kw * g.in_channels];
        const bool larger = (value > best) | (value != value);  // no branch: `|`, not `||`
        best = larger ? value : best;
        position = larger ? kh * kernel + kw : position;
      }
    }
    const bool cut = relu & (best <= 0);
    const int64_t out = ((n * g.out_height + oh) * g.out_width + ow) * g.in_channels + c;
    y[out] = cut ? Real(0) : best;
    where[out] = Position<T>(cut ? kNoMaximum : position);
  }
};

/// Windows of kKernel x kKernel side by side that cover the image exactly: every input pixel is in
/// one window, at one position. Over input pixels.
template <class T, int kKernel>
struct MaxPool2dBackwardTiled {
  Window2d g;
  const T* dy;
  const Position<T>* where;
  T* dx;
  LOCKSTEP_BODY static bool fits(const Window2d& g) {
    return g.kernel == kKernel && g.stride == kKernel && g.in_height == g.out_height * kKernel &&
           g.in_width == g.out_width * kKernel;
  }
  LOCKSTEP_BODY void operator()(int64_t n, int64_t h, int64_t w, int64_t c) const {
    const int64_t pixel = (n * g.out_height + h / kKernel) * g.out_width + w / kKernel;
    const int64_t out = pixel * g.in_channels + c;
    const int position = int(h % kKernel * kKernel + w % kKernel);
    const Real slope = dy[out];  // read whether needed or not: a load without a branch
    dx[((n * g.in_height + h) * g.in_width + w) * g.in_channels + c] =
        where[out] == position ? slope : Real(0);
  }
};

/// Any windows, without padding. Over input pixels: dx [N,H,W,C] becomes the sum of dy [N,OH,OW,C]
/// over the windows that contain the pixel and found their maximum in it. Where they found it says
/// `where` [N,OH,OW,C]: a position within the window, row by row, or -1 for nowhere (ReLU cut it
/// off). Reading instead of scattering needs no atomics and gives the same sum in every run.
template <class T>
struct MaxPool2dBackward {
  Window2d g;
  const T* dy;
  const Position<T>* where;
  T* dx;
  LOCKSTEP_BODY void operator()(int64_t n, int64_t h, int64_t w, int64_t c) const {
    // [task 01.2] max pooling's backward
    const int64_t first_h = h < g.kernel ? 0 : (h - g.kernel) / g.stride + 1;
    const int64_t first_w = w < g.kernel ? 0 : (w - g.kernel) / g.stride + 1;
    Real sum = 0;
    for (int64_t oh = first_h; oh * g.stride <= h && oh < g.out_height; ++oh) {
      for (int64_t ow = first_w; ow * g.stride <= w && ow < g.out_width; ++ow) {
        const int64_t out = ((n * g.out_height + oh) * g.out_width + ow) * g.in_channels + c;
        const int64_t position = (h - oh * g.stride) * g.kernel + (w - ow * g.stride);
        sum += where[out] == position ? dy[out] : Real(0);
      }
    }
    dx[((n * g.in_height + h) * g.in_width + w) * g.in_channels + c] = sum;
    // [end 01.2]
  }
};

/// Inputs of output o: first(o) up to, not including, first(o + 1) rounded up.
struct AdaptiveRange {
  int64_t in, out;
  LOCKSTEP_BODY int64_t first(int64_t o) const { return o * in / out; }
  LOCKSTEP_BODY int64_t end(int64_t o) const { return ((o + 1) * in + out - 1) / out; }
};

/// Over output pixels.
template <class T>
struct AdaptiveAvgPool2d {
  AdaptiveRange rows, columns;
  int64_t channels;
  const T* x;
  T* y;
  LOCKSTEP_BODY void operator()(int64_t n, int64_t oh, int64_t ow, int64_t c) const {
    Real sum = 0;
    for (int64_t h = rows.first(oh); h < rows.end(oh); ++h) {
      for (int64_t w = columns.first(ow); w < columns.end(ow); ++w) {
        sum += x[((n * rows.in + h) * columns.in + w) * channels + c];
      }
    }
    const int64_t area = (rows.end(oh) - rows.first(oh)) * (columns.end(ow) - columns.first(ow));
    y[((n * rows.out + oh) * columns.out + ow) * channels + c] = sum / Real(area);
  }
};

/// Over input pixels: every output whose range contains the pixel gives its share.
template <class T>
struct AdaptiveAvgPool2dBackward {
  AdaptiveRange rows, columns;
  int64_t channels;
  const T* dy;
  T* dx;
  LOCKSTEP_BODY void operator()(int64_t n, int64_t h, int64_t w, int64_t c) const {
    Real sum = 0;
    for (int64_t oh = h * rows.out / rows.in; oh < rows.out && rows.first(oh) <= h; ++oh) {
      for (int64_t ow = w * columns.out / columns.in; ow < columns.out && columns.first(ow) <= w;
           ++ow) {
        if (rows.end(oh) <= h || columns.end(ow) <= w) continue;
        const int64_t area =
            (rows.end(oh) - rows.first(oh)) * (columns.end(ow) - columns.first(ow));
        sum += dy[((n * rows.out + oh) * columns.out + ow) * channels + c] / Real(area);
      }
    }
    dx[((n * rows.in + h) * columns.in + w) * channels + c] = sum;
  }
};

/// One output pixel: every input pixel gets the same share. Over input pixels.
template <class T>
struct GlobalAvgPool2dBackward {
  int64_t height, width, channels;
  const T* dy;
  T* dx;
  LOCKSTEP_BODY void operator()(int64_t n, int64_t h, int64_t w, int64_t c) const {
    dx[((n * height + h) * width + w) * channels + c] = dy[n * channels + c] / Real(height * width);
  }
};

}  // namespace lockstep::bodies
