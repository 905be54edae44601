#include "common/kernels/cpu/few_channels.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "common/kernels/cpu/launch.h"

namespace lockstep::cpu::few_channels {
namespace {

// Sums that stay in registers: 20 of 32 with AVX-512, 10 of 16 with AVX2.
constexpr int64_t kOutputs = 5, kPixels = kLanes >= 16 ? 4 : 2;  // of the output
constexpr int64_t kTaps = 5, kSlopes = kLanes >= 16 ? 5 : 2;     // of the weights' gradient

// --- Samples side by side ------------------------------------------------------------------------

/// Exchanges the numbers beside the diagonal in every square of 2 step x 2 step.
template <size_t step, size_t... k>
inline void exchange(Lanes& upper, Lanes& lower, std::index_sequence<k...>) {
  const Lanes a = upper, b = lower;
  upper = __builtin_shufflevector(a, b, int(k & step ? kLanes + (k ^ step) : k)...);
  lower = __builtin_shufflevector(a, b, int(k & step ? kLanes + k : k | step)...);
}

template <size_t step = 1>
inline void transpose(Lanes (&rows)[kLanes]) {
  if constexpr (step < kLanes) {
#pragma GCC unroll 16
    for (size_t i = 0; i < kLanes; ++i) {
      if ((i & step) == 0)
        exchange<step>(rows[i], rows[i | step], std::make_index_sequence<kLanes>());
    }
    transpose<2 * step>(rows);
  }
}

/// kLanes samples of n numbers each, [samples, n], to [n, samples]; or `kBack`.
template <bool kBack>
void swap_samples(const Real* from, int64_t n, Real* to) {
  const int64_t squares = n / kLanes * kLanes;
  for (int64_t i = 0; i < squares; i += kLanes) {
    Lanes rows[kLanes];
    for (int64_t k = 0; k < kLanes; ++k) {
      rows[k] = load(from + (kBack ? (i + k) * kLanes : k * n + i));
    }
    transpose(rows);
    for (int64_t k = 0; k < kLanes; ++k)
      store(rows[k], to + (kBack ? k * n + i : (i + k) * kLanes));
  }
  for (int64_t i = squares; i < n; ++i) {
    for (int64_t k = 0; k < kLanes; ++k) {
      to[kBack ? k * n + i : i * kLanes + k] = from[kBack ? i * kLanes + k : k * n + i];
    }
  }
}

/// Numbers of one sample, and what a compute thread has of the workspace.
struct Sizes {
  explicit Sizes(const Window2d& g)
      : x(g.in_height * g.in_width * g.in_channels),
        y(g.out_height * g.out_width * g.out_channels),
        row(g.kernel * g.in_channels),
        taps(g.kernel * row),
        parameters((taps + 1) * g.out_channels) {}
  int64_t each() const { return (x + y + parameters) * kLanes; }
  int64_t x, y, row, taps, parameters;  // row, taps: weights of an output, in a row and in all
};

/// f(x, y, first) for every vector of samples: room for its images in [number, sample], and the
/// number of its first sample.
template <class F>
void for_vectors(const Window2d& g, Real* workspace, F f) {
  const Sizes size(g);
  share_out(g.batch / kLanes, kLanes * size.y, [&](int64_t begin, int64_t end) {
    Real* x = workspace + omp_get_thread_num() * size.each();
    for (int64_t i = begin; i < end; ++i) f(x, x + size.x * kLanes, i * kLanes);
  });
}

// --- Sums in registers ---------------------------------------------------------------------------

/// sums[p][o] += sum over q of x[q + p pixel] weight[q step + o output], for n numbers q.
template <int64_t pixels, int64_t outputs>
inline void accumulate(Lanes (&sums)[pixels][outputs], const Real* x, int64_t pixel, int64_t n,
                       const Real* weight, int64_t step, int64_t output) {
  for (int64_t q = 0; q < n; ++q) {
#pragma GCC unroll 10
    for (int64_t o = 0; o < outputs; ++o) {
      const Real factor = weight[q * step + o * output];
#pragma GCC unroll 4
      for (int64_t p = 0; p < pixels; ++p)
        sums[p][o] += factor * load(x + (q + p * pixel) * kLanes);
    }
  }
}

/// kPixels pixels of a row, kOutputs channels each; x and y where they begin.
inline void convolve(const Window2d& g, const Real* x, const Real* weight, const Real* bias,
                     Real* y) {
  const Sizes size(g);
  Lanes sums[kPixels][kOutputs];
  for (int64_t o = 0; o < kOutputs; ++o) {
    for (int64_t p = 0; p < kPixels; ++p) sums[p][o] = Lanes{} + bias[o];
  }
  for (int64_t kh = 0; kh < g.kernel; ++kh) {
    accumulate(sums, x + kh * g.in_width * g.in_channels * kLanes, g.in_channels, size.row,
               weight + kh * size.row, 1, size.taps);
  }
  for (int64_t p = 0; p < kPixels; ++p) {
    for (int64_t o = 0; o < kOutputs; ++o) store(sums[p][o], y + (p * g.out_channels + o) * kLanes);
  }
}

/// Gradient of the pixel (h, w): all outputs whose window has it.
inline void convolve_back(const Window2d& g, int64_t h, int64_t w, const Real* dy,
                          const Real* weight, Real* dx) {
  const Sizes size(g);
  Lanes sums[1][10]{};
  for (int64_t kh = std::max<int64_t>(0, h - g.out_height + 1); kh < std::min(g.kernel, h + 1);
       ++kh) {
    for (int64_t kw = std::max<int64_t>(0, w - g.out_width + 1); kw < std::min(g.kernel, w + 1);
         ++kw) {
      accumulate(sums, dy + ((h - kh) * g.out_width + w - kw) * g.out_channels * kLanes, 0,
                 g.out_channels, weight + kh * size.row + kw * g.in_channels, size.taps, 1);
    }
  }
  for (int64_t i = 0; i < 10; ++i) store(sums[0][i], dx + i * kLanes);
}

/// Gradients of kTaps weights of each of kSlopes outputs: x begins where the first pixel's window
/// meets the first of these weights, dy at the first of these outputs.
inline void add_slopes(const Window2d& g, const Real* x, const Real* dy, Real* dweight) {
  Lanes sums[kSlopes][kTaps]{};
  for (int64_t h = 0; h < g.out_height; ++h) {
    for (int64_t w = 0; w < g.out_width; ++w) {
      const Real* pixel = x + (h * g.in_width + w) * g.in_channels * kLanes;
      const Real* slope = dy + (h * g.out_width + w) * g.out_channels * kLanes;
#pragma GCC unroll 5
      for (int64_t o = 0; o < kSlopes; ++o) {
#pragma GCC unroll 5
        for (int64_t q = 0; q < kTaps; ++q)
          sums[o][q] += load(slope + o * kLanes) * load(pixel + q * kLanes);
      }
    }
  }
  for (int64_t o = 0; o < kSlopes; ++o) {
    for (int64_t q = 0; q < kTaps; ++q) {
      Real* to = dweight + (o * Sizes(g).taps + q) * kLanes;
      store(load(to) + sums[o][q], to);
    }
  }
}

}  // namespace

size_t workspace_bytes(const Window2d& g) {
  return size_t(omp_get_max_threads() * Sizes(g).each()) * sizeof(Real);
}

void conv2d(const Window2d& g, const Real* x, const Real* weight, const Real* bias, Real* y,
            Real* workspace) {
  const Sizes size(g);
  for_vectors(g, workspace, [&](Real* in, Real* out, int64_t first) {
    swap_samples<false>(x + first * size.x, size.x, in);
    for (int64_t h = 0; h < g.out_height; ++h) {
      for (int64_t w = 0; w < g.out_width; w += kPixels) {
        const int64_t left = std::min(w, g.out_width - kPixels);  // the last may overlap
        for (int64_t o = 0; o < g.out_channels; o += kOutputs) {
          convolve(g, in + (h * g.in_width + left) * g.in_channels * kLanes, weight + o * size.taps,
                   bias + o, out + ((h * g.out_width + left) * g.out_channels + o) * kLanes);
        }
      }
    }
    swap_samples<true>(out, size.y, y + first * size.y);
  });
}

void conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight, Real* dx,
                           Real* workspace) {
  const Sizes size(g);
  for_vectors(g, workspace, [&](Real* in, Real* out, int64_t first) {
    swap_samples<false>(dy + first * size.y, size.y, out);
    for (int64_t h = 0; h < g.in_height; ++h) {
      for (int64_t w = 0; w < g.in_width; ++w) {
        convolve_back(g, h, w, out, weight, in + (h * g.in_width + w) * g.in_channels * kLanes);
      }
    }
    swap_samples<true>(in, size.x, dx + first * size.x);
  });
}

void conv2d_backward_parameters(const Window2d& g, const Real* x, const Real* dy, Real* dweight,
                                Real* dbias, Real* workspace) {
  const Sizes size(g);
  const int threads = omp_get_max_threads();
  for (int thread = 0; thread < threads; ++thread) {
    std::fill_n(workspace + (thread + 1) * size.each() - size.parameters * kLanes,
                size.parameters * kLanes, Real(0));
  }
  for_vectors(g, workspace, [&](Real* in, Real* out, int64_t first) {
    swap_samples<false>(x + first * size.x, size.x, in);
    swap_samples<false>(dy + first * size.y, size.y, out);
    Real* sums = out + size.y * kLanes;
    for (int64_t kh = 0; kh < g.kernel; ++kh) {
      for (int64_t q = 0; q < size.row; q += kTaps) {
        for (int64_t o = 0; o < g.out_channels; o += kSlopes) {
          add_slopes(g, in + (kh * g.in_width * g.in_channels + q) * kLanes, out + o * kLanes,
                     sums + (o * size.taps + kh * size.row + q) * kLanes);
        }
      }
    }
    Real* bias_sums = sums + g.out_channels * size.taps * kLanes;
    for (int64_t i = 0; i < size.y; ++i) {
      Real* to = bias_sums + i % g.out_channels * kLanes;
      store(load(to) + load(out + i * kLanes), to);
    }
  });
  for (int thread = 0; thread < threads; ++thread) {  // in order: the same sum in every run
    const Real* sums = workspace + (thread + 1) * size.each() - size.parameters * kLanes;
    const int64_t weights = size.parameters - g.out_channels;
    for (int64_t i = 0; i < size.parameters; ++i) {
      Real sum = 0;
      for (int64_t lane = 0; lane < kLanes; ++lane) sum += sums[i * kLanes + lane];
      (i < weights ? dweight[i] : dbias[i - weights]) += sum;
    }
  }
}

}  // namespace lockstep::cpu::few_channels
