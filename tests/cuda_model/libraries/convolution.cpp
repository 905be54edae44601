#include "libraries/convolution.h"

#include <cstddef>

namespace cuda_model {
namespace {

/// Calls visit(output pixel, input pixel, filter tap) for each tap that lies inside the image.
template <class Visit>
void for_each_tap(const ConvolutionShape& f, int image, Visit visit) {
  for (int p = 0; p < f.p; ++p) {
    for (int q = 0; q < f.q; ++q) {
      for (int r = 0; r < f.r; ++r) {
        const int h = p * f.stride_h - f.pad_h + r * f.dilation_h;
        if (h < 0 || h >= f.h) continue;
        for (int s = 0; s < f.s; ++s) {
          const int w = q * f.stride_w - f.pad_w + s * f.dilation_w;
          if (w < 0 || w >= f.w) continue;
          visit((size_t(image) * f.p + p) * f.q + q, (size_t(image) * f.h + h) * f.w + w,
                size_t(r) * f.s + s);
        }
      }
    }
  }
}

/// [K,R,S,C] as [R,S,C,K]: then the innermost loop runs over output channels.
Values output_channels_last(const ConvolutionShape& f, const Values& filter) {
  const size_t inner = size_t(f.r) * f.s * f.c;
  Values turned(filter.size());
  for (size_t k = 0; k < size_t(f.k); ++k) {
    for (size_t i = 0; i < inner; ++i) turned[i * f.k + k] = filter[k * inner + i];
  }
  return turned;
}

/// y[i] += factor * x[i]
void add_scaled(int n, float factor, const float* __restrict x, float* __restrict y) {
  for (int i = 0; i < n; ++i) y[i] += factor * x[i];
}

}  // namespace

Values convolve(const ConvolutionShape& f, const Values& x, const Values& filter) {
  const Values turned = output_channels_last(f, filter);
  Values y(size_t(f.n) * f.p * f.q * f.k, 0.0f), tap_sums(f.k);
  for (int image = 0; image < f.n; ++image) {
    for_each_tap(f, image, [&](size_t out, size_t in, size_t tap) {
      // Summed by tap first: the error grows with the channels, not with the whole window.
      tap_sums.assign(f.k, 0.0f);
      for (int c = 0; c < f.c; ++c) {
        add_scaled(f.k, x[in * f.c + c], &turned[(tap * f.c + c) * f.k], tap_sums.data());
      }
      add_scaled(f.k, 1.0f, tap_sums.data(), &y[out * f.k]);
    });
  }
  return y;
}

Values convolve_backward_data(const ConvolutionShape& f, const Values& filter, const Values& dy) {
  const size_t taps = size_t(f.r) * f.s;
  Values dx(size_t(f.n) * f.h * f.w * f.c, 0.0f), tap_sums(f.c);
  for (int image = 0; image < f.n; ++image) {
    for_each_tap(f, image, [&](size_t out, size_t in, size_t tap) {
      tap_sums.assign(f.c, 0.0f);
      for (int k = 0; k < f.k; ++k) {
        add_scaled(f.c, dy[out * f.k + k], &filter[(k * taps + tap) * f.c], tap_sums.data());
      }
      add_scaled(f.c, 1.0f, tap_sums.data(), &dx[in * f.c]);
    });
  }
  return dx;
}

Values convolve_backward_filter(const ConvolutionShape& f, const Values& x, const Values& dy) {
  const size_t taps = size_t(f.r) * f.s;
  std::vector<double> totals(taps * f.c * f.k, 0.0);  // [R,S,C,K]
  Values image_sums(totals.size());
  for (int image = 0; image < f.n; ++image) {
    image_sums.assign(totals.size(), 0.0f);
    for_each_tap(f, image, [&](size_t out, size_t in, size_t tap) {
      for (int c = 0; c < f.c; ++c) {
        add_scaled(f.k, x[in * f.c + c], &dy[out * f.k], &image_sums[(tap * f.c + c) * f.k]);
      }
    });
    for (size_t i = 0; i < totals.size(); ++i) totals[i] += image_sums[i];
  }
  Values dw(totals.size());
  const size_t inner = taps * f.c;
  for (size_t k = 0; k < size_t(f.k); ++k) {
    for (size_t i = 0; i < inner; ++i) dw[k * inner + i] = float(totals[i * f.k + k]);
  }
  return dw;
}

}  // namespace cuda_model
