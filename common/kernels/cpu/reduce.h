#pragma once
// How the bodies that reduce run on a CPU device: rows by teams, columns by sums, and "is there
// any".

#include "common/kernels/cpu/launch.h"

namespace lockstep::cpu {

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
  void each(int64_t n, F f) const {
    for (int64_t i = 0; i < n; ++i) f(i);
  }
  template <class F>
  void leader(F f) const {
    f();
  }
};

/// All launchers of the CPU backend, for BodyKernels.
struct Launch : ElementLaunch {
  /// body(team, row) for every row. Their length matters to GPUs only.
  template <class Body>
  static void for_each_team(Stream stream, const char* op, int64_t rows, int64_t /*length*/,
                            Body body) {
    cpu_stream(stream).enqueue(op, [=] {
      for (int64_t row = 0; row < rows; ++row) body(SerialTeam(), row);
    });
  }

  /// Sums body.terms(row, c) over the rows of [rows, channels], then body.finish(c, sums). Rows are
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
              const auto terms = run.terms(row, c);
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
