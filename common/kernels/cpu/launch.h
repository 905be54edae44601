#pragma once
// How the bodies run on a CPU device: loops in a task of the stream, the innermost one vectorised,
// the outermost one shared out over the device's compute threads.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/core/cpu_stream.h"
#include "common/core/tensor.h"
#include "common/kernels/bodies/portable.h"

namespace lockstep::cpu {

inline CpuStream& cpu_stream(Stream stream) { return static_cast<CpuStream&>(stream.backend()); }

/// Calls f(begin, end) for consecutive pieces of [0, n), one per compute thread. Few elements stay
/// on the calling thread: waking a team costs more than the work itself.
template <class F>
void share_out(int64_t n, int64_t elements_each, F f) {
  const int threads = omp_get_max_threads();
  if (threads == 1 || n * elements_each < 16384) {
    f(int64_t{0}, n);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
    f(n * thread / team, n * (thread + 1) / team);
  }
}

/// f(c) for every channel. Images have few channels (10 in the seed network). The single steps of a
/// plain loop after its last full vector would take most of the time, and branch on every pixel's
/// value. Instead the last vector overlaps the one before it, which is allowed because f
/// overwrites: doing a channel twice changes nothing.
template <class F>
inline void for_channels(int64_t channels, F f) {
  constexpr int64_t kLanes = 32 / sizeof(Real);
  if (channels < kLanes) {
    for (int64_t c = 0; c < channels; ++c) f(c);
    return;
  }
  for (int64_t c = 0; c < channels; c += kLanes) {
    const int64_t first = std::min(c, channels - kLanes);
#ifdef __clang__  // which does not know ivdep
#pragma omp simd
#else
#pragma GCC ivdep
#pragma GCC unroll 1
#endif
    for (int64_t lane = 0; lane < kLanes; ++lane) f(first + lane);
  }
}

/// A team of one thread: on a GPU it is a block of threads.
struct SerialTeam {
  template <class F>
  Real max(int64_t n, F f) const {
    Real top = f(0);
    for (int64_t i = 1; i < n; ++i) top = std::max(top, f(i));
    return top;
  }
  template <class F>
  Real sum(int64_t n, F f) const {
    Real total = 0;
    for (int64_t i = 0; i < n; ++i) total += f(i);
    return total;
  }
  template <class F>
  Real sum(const Real* values, int64_t n, F f) const {
    return sum(n, [=](int64_t i) { return f(values[i]); });
  }
  template <class F>
  void each(int64_t n, F f) const {
    for (int64_t i = 0; i < n; ++i) f(i);
  }
  template <class F>
  void leader(F f) const {
    f();
  }
};

/// The launchers of CPU devices, for BodyKernels (kernels.inl). Each copies the body next to its
/// loop. Through a reference the compiler would have to assume that the loop's own stores change
/// the body's pointers, and could not vectorise.
struct Launch {
  /// body(i) for i in [0, n). A body that has enabled() is asked when the operation runs; one that
  /// has prepared() is prepared then.
  template <class Body>
  static void for_each(Stream stream, const char* op, int64_t n, Body body) {
    cpu_stream(stream).enqueue(op, [=] {
      if constexpr (requires { body.enabled(); }) {
        if (!body.enabled()) return;
      }
      const auto ready = bodies::prepared(body);
      share_out(n, 1, [&](int64_t begin, int64_t end) {
        const auto run = ready;
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) run(i);
      });
    });
  }

  /// The same for the elements that are marked: stretch after stretch, each prepared by itself.
  template <class Body>
  static void for_each_marked(Stream stream, const char* op, int64_t n, bodies::Marked marked,
                              Body body) {
    cpu_stream(stream).enqueue(op, [=] {
      if (!body.enabled()) return;
      share_out(n, 1, [&](int64_t begin, int64_t end) {
        for (const Stretch* stretch = marked.stretches; begin < end; ++stretch) {
          const int64_t stop = std::min(end, stretch->end);
          if (begin < stop && marked.updates(*stretch)) {
            const auto run = bodies::prepared_for(body, stretch->parameter);
#pragma omp simd
            for (int64_t i = begin; i < stop; ++i) run(i);
          }
          begin = std::max(begin, stop);
        }
      });
    });
  }

  /// body(i, row, feature) for every element i of [rows, features].
  template <class Body>
  static void for_each_row(Stream stream, const char* op, int64_t rows, int64_t features,
                           Body body) {
    cpu_stream(stream).enqueue(op, [=] {
      share_out(rows, features, [&](int64_t begin, int64_t end) {
        const Body run = body;
        for (int64_t row = begin; row < end; ++row) {
#pragma omp simd
          for (int64_t f = 0; f < features; ++f) run(row * features + f, row, f);
        }
      });
    });
  }

  /// body(n, h, w, c) for every element of an NHWC shape. The body overwrites its outputs.
  template <class Body>
  static void for_each_pixel(Stream stream, const char* op, const Shape& shape, Body body) {
    const int64_t height = shape[1], width = shape[2], channels = shape[3];
    cpu_stream(stream).enqueue(op, [=, images = shape[0]] {
      share_out(images, height * width * channels, [&](int64_t begin, int64_t end) {
        const Body run = body;
        for (int64_t n = begin; n < end; ++n) {
          for (int64_t h = 0; h < height; ++h) {
            for (int64_t w = 0; w < width; ++w) {
              for_channels(channels, [&](int64_t c) { run(n, h, w, c); });
            }
          }
        }
      });
    });
  }

  /// body(team, row) for every row, one after another on one thread. Their length matters to GPUs
  /// only.
  template <class Body>
  static void for_each_team(Stream stream, const char* op, int64_t rows, int64_t /*length*/,
                            Body body) {
    cpu_stream(stream).enqueue(op, [=] {
      for (int64_t row = 0; row < rows; ++row) body(SerialTeam(), row);
    });
  }

  /// Sums body.terms(i, c) over the rows of [rows, channels], then body.finish(c, sums). Rows are
  /// added in blocks in Real, blocks in double: fast, and the error does not grow with the rows.
  template <class Body>
  static void reduce_rows(Stream stream, const char* op, int64_t rows, int64_t channels,
                          Body body) {
    constexpr int64_t kBlock = 128;
    cpu_stream(stream).enqueue(op, [=] {
      std::vector<double> totals(static_cast<size_t>(2 * channels * omp_get_max_threads()), 0.0);
      share_out((rows + kBlock - 1) / kBlock, kBlock * channels, [&](int64_t first, int64_t last) {
        const Body run = body;
        double* total = totals.data() + 2 * channels * omp_get_thread_num();
        std::vector<Real> sums(static_cast<size_t>(2 * channels));
        for (int64_t block = first; block < last; ++block) {
          std::fill(sums.begin(), sums.end(), Real(0));
          Real* first_sum = sums.data();
          Real* second_sum = sums.data() + channels;
          for (int64_t row = block * kBlock; row < std::min(rows, (block + 1) * kBlock); ++row) {
#pragma omp simd
            for (int64_t c = 0; c < channels; ++c) {
              const auto terms = run.terms(row * channels + c, c);
              first_sum[c] += terms.first;
              second_sum[c] += terms.second;
            }
          }
          for (int64_t i = 0; i < 2 * channels; ++i) total[i] += double(sums[i]);
        }
      });
      for (int64_t c = 0; c < channels; ++c) {
        double first_sum = 0, second_sum = 0;  // threads in order: the same sum in every run
        for (size_t at = c; at < totals.size(); at += 2 * channels) {
          first_sum += totals[at];
          second_sum += totals[at + channels];
        }
        body.finish(c, first_sum, second_sum);
      }
    });
  }

  /// body.report() if body.found(i) for any i in [0, n).
  template <class Body>
  static void report_if_any(Stream stream, const char* op, int64_t n, Body body) {
    cpu_stream(stream).enqueue(op, [=] {
      const Body run = body;
      int found = 0;
#pragma omp simd reduction(| : found)
      for (int64_t i = 0; i < n; ++i) found |= run.found(i);
      if (found) body.report();
    });
  }
};

}  // namespace lockstep::cpu
