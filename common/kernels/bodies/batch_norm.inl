#pragma once
// Batch normalisation over rows (N H W) of [rows, C], in pieces.
//
// The number of rows travels with the statistics, in device memory: where several devices have
// parts of a batch, no host knows the number.

#include <cmath>
#include <type_traits>

#include "common/core/sixteen_bits.h"
#include "common/kernels/bodies/portable.h"

namespace lockstep::bodies {

/// Mean and M2 in one pass over x. Summing x - x[0] instead of x keeps the digits when the mean is
/// large beside the spread: M2 = sum d^2 - (sum d)^2 / n with d = x - x[0]. All zeros for no rows.
template <class T>
struct BatchNormStatistics {
  const T* x;
  const T* first;  // x's first row
  int64_t rows, channels;
  Real* statistics;  // [2 channels + 1]: means, M2s, rows
  using Arrays = Members<&BatchNormStatistics::x>;
  using FeatureArrays = Members<&BatchNormStatistics::first>;
  LOCKSTEP_BODY Terms terms(int64_t i, int64_t c) const {
    const Real d = Real(x[i]) - Real(first[c]);
    return {d, d * d};
  }
  LOCKSTEP_BODY Real mean(int64_t c, double sum) const {
    return Real(rows > 0 ? double(first[c]) + sum / double(rows) : 0);
  }
  LOCKSTEP_BODY Real m2(double sum, double squares) const {
    const double m2 = rows > 0 ? squares - sum * sum / double(rows) : 0;
    return Real(m2 < 0 ? 0 : m2);
  }
  LOCKSTEP_BODY void finish(int64_t c, double sum, double squares) const {
    statistics[c] = mean(c, sum);
    statistics[channels + c] = m2(sum, squares);
    if (c == 0) statistics[2 * channels] = Real(rows);
  }
};

/// Statistics of a batch from those of its parts, one after another (all ranks in the same order,
/// so that they get the same bits): the pairwise update of Chan, Golub and LeVeque ("Updating
/// formulae and a pairwise algorithm for computing sample variances", 1979). No square of a mean
/// occurs, so that nothing cancels. One call per channel.
struct BatchNormMerge {
  const Real* gathered;  // [parts, 2 channels + 1]
  int64_t parts, channels;
  Real* statistics;
  LOCKSTEP_BODY void operator()(int64_t c) const {
    // [task 05.1] Chan merge
    double mean = 0, m2 = 0, rows = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const Real* other = gathered + part * (2 * channels + 1);
      const double more = other[2 * channels];
      const double d = other[c] - mean, share = more > 0 ? more / (rows + more) : 0;
      mean += d * share;
      m2 += other[channels + c] + d * d * rows * share;
      rows += more;
    }
    statistics[c] = Real(mean);
    statistics[channels + c] = Real(m2);
    if (c == 0) statistics[2 * channels] = Real(rows);
    // [end 05.1]
  }
};

/// One call per channel. Fewer than two rows have no unbiased variance: the running statistics then
/// stay as they are.
struct BatchNormPrepare {
  const Real* statistics;  // [2 channels + 1]: means, M2s, rows
  int64_t channels;
  Real eps, momentum;
  Real* running_mean;
  Real* running_var;
  Real* norm;  // [2 channels + 1]: means, 1 / standard deviations, 1 / rows (0 for none)
  LOCKSTEP_BODY void operator()(int64_t c) const {
    prepare(c, statistics[c], statistics[channels + c], statistics[2 * channels]);
  }
  LOCKSTEP_BODY void prepare(int64_t c, Real mean, Real m2, Real rows) const {
    norm[c] = mean;
    norm[channels + c] = 1 / std::sqrt((rows > 0 ? m2 / rows : 0) + eps);
    if (c == 0) norm[2 * channels] = rows > 0 ? 1 / rows : 0;
    // PyTorch normalises with the biased variance, but keeps the unbiased one.
    if (momentum > 0 && rows > 1) {
      running_mean[c] += momentum * (mean - running_mean[c]);
      running_var[c] += momentum * (m2 / (rows - 1) - running_var[c]);
    }
  }
};

/// Statistics, and what is prepared from them: for a batch that one device sees as a whole. Neither
/// part has memory for statistics.
template <class T>
struct BatchNormMeasure : BatchNormStatistics<T> {
  BatchNormPrepare next;
  LOCKSTEP_BODY void finish(int64_t c, double sum, double squares) const {
    next.prepare(c, this->mean(c, sum), this->m2(sum, squares), Real(this->rows));
  }
};

/// One call per channel.
struct BatchNormPrepareEval {
  const Real* running_mean;
  const Real* running_var;
  int64_t channels;
  Real eps;
  Real* norm;  // [2 channels]
  LOCKSTEP_BODY void operator()(int64_t c) const {
    norm[c] = running_mean[c];
    norm[channels + c] = 1 / std::sqrt(running_var[c] + eps);
  }
};

/// The affine map of one channel, the same expression forward and backward: a fused ReLU must cut
/// the gradient exactly where it cut the value.
struct BatchNormAffine {
  const Real* mean;
  const Real* invstd;  // 1 / standard deviation
  const Real* weight;
  const Real* bias;
  LOCKSTEP_BODY Real affine(Real x, int64_t c) const {
    return (x - mean[c]) * (invstd[c] * weight[c]) + bias[c];
  }
  using FeatureArrays = Members<&BatchNormAffine::mean, &BatchNormAffine::invstd,
                                &BatchNormAffine::weight, &BatchNormAffine::bias>;
};

/// Over (row, channel). kSkip adds a residual before the ReLU.
template <class T, bool kRelu, bool kSkip>
struct BatchNorm : BatchNormAffine {
  const T* x;
  const T* skip;
  T* y;
  using Arrays = std::conditional_t<kSkip, Members<&BatchNorm::x, &BatchNorm::skip, &BatchNorm::y>,
                                    Members<&BatchNorm::x, &BatchNorm::y>>;
  LOCKSTEP_BODY void operator()(int64_t i, int64_t /*row*/, int64_t c) const {
    Real value = affine(x[i], c);
    if (kSkip) value += skip[i];
    y[i] = kRelu ? positive_part(value) : value;
  }
};

/// The sums, and from them the gradients of weight and bias, which add up.
template <class T, bool kRelu>
struct BatchNormBackwardSums : BatchNormAffine {
  const T* x;
  const T* dy;
  int64_t channels;
  Real* sums;  // [2, channels]
  Real* dweight;
  Real* dbias;
  using Arrays = Members<&BatchNormBackwardSums::x, &BatchNormBackwardSums::dy>;
  LOCKSTEP_BODY Terms terms(int64_t i, int64_t c) const {
    const Real whole = dy[i];  // read whether needed or not: a load does not wait for another
    const Real g = kRelu && !(affine(x[i], c) > 0) ? Real(0) : whole;
    return {g, g * (Real(x[i]) - mean[c])};
  }
  LOCKSTEP_BODY void finish(int64_t c, double sum_dy, double sum_dy_xmu) const {
    sums[c] = Real(sum_dy);
    sums[channels + c] = Real(sum_dy_xmu);
    dweight[c] += sums[channels + c] * invstd[c];
    dbias[c] += sums[c];
  }
};

/// Over (row, channel).
template <class T, bool kRelu>
struct BatchNormBackwardInput : BatchNormAffine {
  const T* x;
  const T* dy;
  const Real* sum_dy;
  const Real* sum_dy_xmu;
  const Real* inverse_count;  // 1 / rows
  T* dx;
  using Arrays =
      Members<&BatchNormBackwardInput::x, &BatchNormBackwardInput::dy, &BatchNormBackwardInput::dx>;
  using FeatureArrays =
      Members<&BatchNormAffine::mean, &BatchNormAffine::invstd, &BatchNormAffine::weight,
              &BatchNormAffine::bias, &BatchNormBackwardInput::sum_dy,
              &BatchNormBackwardInput::sum_dy_xmu>;
  LOCKSTEP_BODY void operator()(int64_t i, int64_t /*row*/, int64_t c) const {
    const Real whole = dy[i];  // read whether needed or not
    const Real g = kRelu && !(affine(x[i], c) > 0) ? Real(0) : whole;
    const Real mean_dy = sum_dy[c] * *inverse_count;
    const Real slope = sum_dy_xmu[c] * *inverse_count * invstd[c] * invstd[c];
    dx[i] = weight[c] * invstd[c] * (g - mean_dy - (x[i] - mean[c]) * slope);
  }
};

}  // namespace lockstep::bodies
