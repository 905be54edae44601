#pragma once
// One call per row, by a Team: team.max, team.sum, team.each run over the row's elements, leader()
// runs once. On the CPU a team is the calling thread, on CUDA a block.

#include <cmath>

#include "common/core/sixteen_bits.h"
#include "common/kernels/bodies/portable.h"

namespace lockstep::bodies {

/// Subtracting the maximum first keeps exp() from overflowing. Scores x may have 16 bits, T; what
/// comes of them is Real.
template <class T>
struct LogSoftmax {
  const T* x;
  int64_t classes;
  Real* y;
  template <class Team>
  LOCKSTEP_BODY void operator()(const Team& team, int64_t row) const {
    const T* in = x + row * classes;
    Real* out = y + row * classes;
    const Real top = team.max(classes, [=](int64_t k) { return Real(in[k]); });
    const Real sum = team.sum(classes, [=](int64_t k) { return std::exp(Real(in[k]) - top); });
    const Real log_sum = std::log(sum);
    team.each(classes, [=](int64_t k) { out[k] = Real(in[k]) - top - log_sum; });
  }
};

template <class T>
struct LogSoftmaxBackward {
  const Real* y;
  const Real* dy;
  int64_t classes;
  T* dx;
  template <class Team>
  LOCKSTEP_BODY void operator()(const Team& team, int64_t row) const {
    const int64_t first = row * classes;
    const Real sum = team.sum(classes, [=, *this](int64_t k) { return dy[first + k]; });
    team.each(classes, [=, *this](int64_t k) {
      dx[first + k] = dy[first + k] - std::exp(y[first + k]) * sum;
    });
  }
};

/// One team for the whole batch.
struct NllLoss {
  const StepState* state;
  const Real* log_probabilities;  // [samples, classes]
  const int32_t* labels;
  int64_t samples, classes;
  Real* loss;
  template <class Team>
  LOCKSTEP_BODY void operator()(const Team& team, int64_t) const {
    const Real sum = team.sum(
        samples, [=, *this](int64_t n) { return log_probabilities[n * classes + labels[n]]; });
    team.leader([=, *this] { loss[0] -= state->loss_weight * sum; });
  }
};

/// Over (sample, class).
struct NllLossBackward {
  const StepState* state;
  const int32_t* labels;
  Real* dx;
  using Arrays = Members<&NllLossBackward::dx>;
  LOCKSTEP_BODY void operator()(int64_t i, int64_t n, int64_t k) const {
    const Real weight = state->loss_weight;  // read whether needed or not
    dx[i] = k == labels[n] ? -weight : Real(0);
  }
};

/// One team for the whole batch. Counts fit in Real: they are whole numbers below 2^24.
template <class T>
struct CountCorrect {
  const T* scores;  // [samples, classes]
  const int32_t* labels;
  int64_t samples, classes;
  int64_t* count;
  template <class Team>
  LOCKSTEP_BODY void operator()(const Team& team, int64_t) const {
    const Real hits = team.sum(samples, [=, *this](int64_t n) {
      const T* row = scores + n * classes;
      int64_t best = 0;
      Real top = row[0];
      for (int64_t k = 1; k < classes; ++k) {
        const bool larger = row[k] > top;
        best = larger ? k : best;
        top = larger ? Real(row[k]) : top;
      }
      return best == labels[n] ? Real(1) : Real(0);
    });
    team.leader([=, *this] { count[0] += int64_t(hits); });
  }
};

}  // namespace lockstep::bodies
