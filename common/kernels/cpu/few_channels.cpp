#include "common/kernels/cpu/few_channels.h"

#include <algorithm>

#include "common/kernels/cpu/launch.h"

namespace lockstep::cpu::few_channels {
namespace {

// Sums side by side in registers: 20 of 32 with AVX-512, 10 of 16 with AVX2.
constexpr int64_t kPixels = kLanes >= 16 ? 4 : 2, kOutputs = 5;
constexpr int64_t kSlopes = kLanes >= 16 ? 5 : 2, kTaps = 5;
constexpr int64_t kInputs = 10;

/// What there is of each for a vector of samples.
struct Sizes {
  explicit Sizes(const Window2d& g)
      : x(g.in_height * g.in_width * g.in_channels),
        y(g.out_height * g.out_width * g.out_channels),
        row(g.kernel * g.in_channels),
        taps(g.kernel * row),
        weights(g.out_channels * taps),
        each(x + y + weights + g.out_channels) {}
  int64_t x, y;                // pixels, times channels
  int64_t row, taps, weights;  // of one output, in a row of the window and in all; of all outputs
  int64_t each;                // workspace of a compute thread: x, y, gradients of weights and bias
};

/// sums[p][o] += x[q + p * pixel] * weight[q * step + o * output], summed over q < n.
template <int64_t pixels, int64_t outputs>
inline void accumulate(Lanes (&sums)[pixels][outputs], const Lanes* x, int64_t pixel, int64_t n,
                       const Real* weight, int64_t step, int64_t output) {
  for (int64_t q = 0; q < n; ++q) {
#pragma GCC unroll 10
    for (int64_t o = 0; o < outputs; ++o) {
      const Real factor = weight[q * step + o * output];
#pragma GCC unroll 4
      for (int64_t p = 0; p < pixels; ++p) sums[p][o] += factor * x[q + p * pixel];
    }
  }
}

/// kPixels pixels of a row, kOutputs channels each, from where the pointers point.
inline void convolve(const Window2d& g, const Sizes& size, const Lanes* x, const Real* weight,
                     const Real* bias, Lanes* y) {
  Lanes sums[kPixels][kOutputs];
  for (int64_t p = 0; p < kPixels; ++p) {
    for (int64_t o = 0; o < kOutputs; ++o) sums[p][o] = Lanes{} + bias[o];
  }
  for (int64_t kh = 0; kh < g.kernel; ++kh) {
    accumulate(sums, x + kh * g.in_width * g.in_channels, g.in_channels, size.row,
               weight + kh * size.row, 1, size.taps);
  }
  for (int64_t p = 0; p < kPixels; ++p) {
    for (int64_t o = 0; o < kOutputs; ++o) y[p * g.out_channels + o] = sums[p][o];
  }
}

/// The gradient of pixel (h, w): from all outputs whose window has it.
inline void convolve_back(const Window2d& g, const Sizes& size, int64_t h, int64_t w,
                          const Lanes* dy, const Real* weight, Lanes* dx) {
  Lanes sums[1][kInputs]{};
  const int64_t top = std::max<int64_t>(0, h - g.out_height + 1), end = std::min(g.kernel, h + 1);
  const int64_t left = std::max<int64_t>(0, w - g.out_width + 1), right = std::min(g.kernel, w + 1);
  for (int64_t kh = top; kh < end; ++kh) {
    for (int64_t kw = left; kw < right; ++kw) {
      accumulate(sums, dy + ((h - kh) * g.out_width + w - kw) * g.out_channels, 0, g.out_channels,
                 weight + kh * size.row + kw * g.in_channels, size.taps, 1);
    }
  }
  for (int64_t i = 0; i < kInputs; ++i) dx[i] = sums[0][i];
}

/// Adds to the gradients of kTaps weights of each of kSlopes outputs. x begins where the first
/// pixel's window meets the first of these weights, dy at the first of these outputs.
inline void add_slopes(const Window2d& g, const Sizes& size, const Lanes* x, const Lanes* dy,
                       Lanes* dweight) {
  Lanes sums[kSlopes][kTaps]{};
  for (int64_t h = 0; h < g.out_height; ++h) {
    for (int64_t w = 0; w < g.out_width; ++w) {
      const Lanes* pixel = x + (h * g.in_width + w) * g.in_channels;
      const Lanes* slope = dy + (h * g.out_width + w) * g.out_channels;
#pragma GCC unroll 5
      for (int64_t o = 0; o < kSlopes; ++o) {
#pragma GCC unroll 5
        for (int64_t q = 0; q < kTaps; ++q) sums[o][q] += slope[o] * pixel[q];
      }
    }
  }
  for (int64_t o = 0; o < kSlopes; ++o) {
    for (int64_t q = 0; q < kTaps; ++q) dweight[o * size.taps + q] += sums[o][q];
  }
}

/// f(x, y, first) for every vector of samples: memory for them, and the number of the first.
template <class F>
void for_vectors(const Window2d& g, const Sizes& size, Lanes* workspace, F f) {
  share_out(g.batch / kLanes, kLanes * size.y, [&](int64_t begin, int64_t end) {
    Lanes* x = workspace + omp_get_thread_num() * size.each;
    for (int64_t i = begin; i < end; ++i) f(x, x + size.x, i * kLanes);
  });
}

}  // namespace

size_t workspace_bytes(const Window2d& g) {
  return size_t(omp_get_max_threads() * Sizes(g).each) * sizeof(Lanes);
}

void conv2d(const Window2d& g, const Real* x, const Real* weight, const Real* bias, Real* y,
            void* workspace) {
  const Sizes size(g);
  for_vectors(g, size, static_cast<Lanes*>(workspace), [&](Lanes* in, Lanes* out, int64_t first) {
    to_lanes(x + first * size.x, size.x, in);
    for (int64_t h = 0; h < g.out_height; ++h) {
      for (int64_t w = 0; w < g.out_width; w += kPixels) {
        const int64_t left = std::min(w, g.out_width - kPixels);  // the last ones may overlap
        for (int64_t o = 0; o < g.out_channels; o += kOutputs) {
          convolve(g, size, in + (h * g.in_width + left) * g.in_channels, weight + o * size.taps,
                   bias + o, out + (h * g.out_width + left) * g.out_channels + o);
        }
      }
    }
    from_lanes(out, size.y, y + first * size.y);
  });
}

void conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight, Real* dx,
                           void* workspace) {
  const Sizes size(g);
  for_vectors(g, size, static_cast<Lanes*>(workspace), [&](Lanes* in, Lanes* out, int64_t first) {
    to_lanes(dy + first * size.y, size.y, out);
    for (int64_t h = 0; h < g.in_height; ++h) {
      for (int64_t w = 0; w < g.in_width; ++w) {
        convolve_back(g, size, h, w, out, weight, in + (h * g.in_width + w) * g.in_channels);
      }
    }
    from_lanes(in, size.x, dx + first * size.x);
  });
}

void conv2d_backward_parameters(const Window2d& g, const Real* x, const Real* dy, Real* dweight,
                                Real* dbias, void* workspace) {
  const Sizes size(g);
  const int threads = omp_get_max_threads();
  Lanes* const all = static_cast<Lanes*>(workspace);
  for (int thread = 0; thread < threads; ++thread) {
    std::fill_n(all + thread * size.each + size.x + size.y, size.each - size.x - size.y, Lanes{});
  }
  for_vectors(g, size, all, [&](Lanes* in, Lanes* out, int64_t first) {
    to_lanes(x + first * size.x, size.x, in);
    to_lanes(dy + first * size.y, size.y, out);
    Lanes* const weights = out + size.y;
    for (int64_t kh = 0; kh < g.kernel; ++kh) {
      for (int64_t q = 0; q < size.row; q += kTaps) {
        for (int64_t o = 0; o < g.out_channels; o += kSlopes) {
          add_slopes(g, size, in + kh * g.in_width * g.in_channels + q, out + o,
                     weights + o * size.taps + kh * size.row + q);
        }
      }
    }
    for (int64_t i = 0; i < size.y; ++i) weights[size.weights + i % g.out_channels] += out[i];
  });
  for (int thread = 0; thread < threads; ++thread) {  // in order: the same sums in every run
    const Lanes* sums = all + thread * size.each + size.x + size.y;
    for (int64_t i = 0; i < size.weights + g.out_channels; ++i) {
      Real sum = 0;
      for (int64_t k = 0; k < kLanes; ++k) sum += sums[i][k];
      (i < size.weights ? dweight[i] : dbias[i - size.weights]) += sum;
    }
  }
}

}  // namespace lockstep::cpu::few_channels
