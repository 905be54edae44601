// Batch normalisation against the textbook, and statistics of parts.

#include "common/core/error.h"
#include "common/kernels/kernels.h"

#include "tests/support/catch.h"
#include "tests/support/nn_test_support.h"
#include "tests/unit/kernels/kernels_test_support.h"

namespace lockstep {
namespace {

using namespace testing::kernels;
using testing::kDouble;
using testing::random_values;
using testing::relative_error;
using testing::TestDevice;
using Values = std::vector<Real>;
using Doubles = std::vector<double>;

// --- Batch normalisation -------------------------------------------------------------------------

constexpr double kEps = 1e-5;

/// One channel of a batch, and the textbook's formulas for it, in double.
struct PlainBatchNorm {
  Doubles x;
  double mean = 0, m2 = 0;

  PlainBatchNorm(const Values& all, int64_t channels, int64_t c) {
    for (size_t i = c; i < all.size(); i += channels) x.push_back(all[i]);
    for (const double value : x) mean += value / double(x.size());
    for (const double value : x) m2 += (value - mean) * (value - mean);
  }
  double invstd() const { return 1 / std::sqrt(m2 / double(x.size()) + kEps); }
  double normalized(size_t row) const { return (x[row] - mean) * invstd(); }
};

TEST_CASE("Batch normalisation is the textbook's, in training and evaluation", "[kernels][row12]") {
  const TestDevice d(GENERATE(1, 2));
  const int64_t channels = 7;
  const Shape shape{47, 9, 6, channels};
  const int64_t rows = shape.elements() / channels;
  const bool relu = GENERATE(false, true), with_skip = GENERATE(false, true);
  const Values x = random_values(shape, 1), skip = random_values(shape, 2);
  const Values weight = random_values({channels}, 3), bias = random_values({channels}, 4);
  const Values old_mean = random_values({channels}, 5);
  const Values old_var = with_each(random_values({channels}, 6), [](Real v) { return v + 2; });

  const Tensor statistics = d.filled({2 * channels + 1}, kNaN);
  const Tensor norm = d.filled({2 * channels + 1}, kNaN);
  const Tensor running_mean = d.put({channels}, old_mean), running_var = d.put({channels}, old_var);
  const Tensor input = d.put(shape, x), w = d.put({channels}, weight), b = d.put({channels}, bias);
  const Tensor y = d.filled(shape, kNaN), eval = d.filled(shape, kNaN);
  const Tensor added = with_skip ? d.put(shape, skip) : Tensor();
  Kernels& kernels = d.kernels();
  kernels.batch_norm_statistics(d.stream, input, statistics);
  kernels.batch_norm_prepare(d.stream, statistics, Real(kEps), Real(0.1), running_mean, running_var,
                             norm);
  kernels.batch_norm(d.stream, input, norm, w, b, added, relu, y);
  const Values new_mean = running_mean.to_host(), new_var = running_var.to_host();
  const Values two_steps = norm.to_host();
  running_mean.copy_from_host(old_mean);
  running_var.copy_from_host(old_var);
  kernels.batch_norm_measure(d.stream, input, Real(kEps), Real(0.1), running_mean, running_var,
                             norm);
  CHECK(norm.to_host() == two_steps);
  CHECK(running_mean.to_host() == new_mean);
  CHECK(running_var.to_host() == new_var);
  // A momentum of 0 leaves the running statistics alone.
  kernels.batch_norm_prepare(d.stream, statistics, Real(kEps), 0, running_mean, running_var, norm);
  CHECK(running_mean.to_host() == new_mean);
  CHECK(running_var.to_host() == new_var);
  kernels.batch_norm_prepare_eval(d.stream, running_mean, running_var, Real(kEps), norm);
  kernels.batch_norm(d.stream, input, norm, w, b, added, relu, eval);

  Doubles expected_statistics(2 * channels + 1, double(rows)), mean(channels), var(channels);
  Doubles expected(x.size()), expected_eval(x.size());
  for (int64_t c = 0; c < channels; ++c) {
    const PlainBatchNorm plain(x, channels, c);
    expected_statistics[c] = plain.mean;
    expected_statistics[channels + c] = plain.m2;
    mean[c] = 0.9 * old_mean[c] + 0.1 * plain.mean;
    var[c] = 0.9 * old_var[c] + 0.1 * plain.m2 / double(rows - 1);  // unbiased
    for (int64_t row = 0; row < rows; ++row) {
      const size_t i = row * channels + c;
      const double residual = with_skip ? skip[i] : 0;
      const double train = plain.normalized(row) * weight[c] + bias[c] + residual;
      const double test =
          (x[i] - mean[c]) / std::sqrt(var[c] + kEps) * weight[c] + bias[c] + residual;
      expected[i] = relu ? std::max(0.0, train) : train;
      expected_eval[i] = relu ? std::max(0.0, test) : test;
    }
  }
  CHECK(relative_error(statistics.to_host(), expected_statistics) <= kSums);
  CHECK(relative_error(new_mean, mean) <= kSums);
  CHECK(relative_error(new_var, var) <= kSums);
  CHECK(relative_error(y.to_host(), expected) <= kSums);
  CHECK(relative_error(eval.to_host(), expected_eval) <= kSums);
}

TEST_CASE("Backward of batch normalisation is the textbook's", "[kernels][row12]") {
  const TestDevice d(GENERATE(1, 2));
  const int64_t channels = 5;
  const Shape shape{61, 9, 7, channels};
  const int64_t rows = shape.elements() / channels;
  const bool relu = GENERATE(false, true);
  const Values x = random_values(shape, 1), dy = random_values(shape, 2);
  const Values weight = random_values({channels}, 3), bias = random_values({channels}, 4);
  const Values old = random_values({channels}, 5);

  const Tensor statistics = d.filled({2 * channels + 1}, 0), norm = d.filled({2 * channels + 1}, 0);
  const Tensor sums = d.filled({2, channels}, kNaN), dx = d.filled(shape, kNaN);
  const Tensor input = d.put(shape, x), slope = d.put(shape, dy);
  const Tensor w = d.put({channels}, weight), b = d.put({channels}, bias);
  const Tensor dweight = d.put({channels}, old), dbias = d.put({channels}, old);
  Kernels& kernels = d.kernels();
  kernels.batch_norm_statistics(d.stream, input, statistics);
  kernels.batch_norm_prepare(d.stream, statistics, Real(kEps), 0, dbias, dbias, norm);
  kernels.batch_norm_backward_sums(d.stream, input, slope, norm, w, b, relu, sums, dweight, dbias);
  kernels.batch_norm_backward_input(d.stream, input, slope, norm, w, b, relu, sums, dx);

  Doubles expected_dx(x.size()), expected_sums(2 * channels);
  Doubles expected_dweight(channels), expected_dbias(channels);
  for (int64_t c = 0; c < channels; ++c) {
    const PlainBatchNorm plain(x, channels, c);
    const auto gradient = [&](int64_t row) {  // after the fused ReLU
      const bool cut = relu && plain.normalized(row) * weight[c] + bias[c] <= 0;
      return cut ? 0.0 : double(dy[row * channels + c]);
    };
    double sum = 0, sum_normalized = 0;
    for (int64_t row = 0; row < rows; ++row) {
      sum += gradient(row);
      sum_normalized += gradient(row) * plain.normalized(row);
    }
    expected_sums[c] = sum;
    expected_sums[channels + c] = sum_normalized / plain.invstd();
    expected_dbias[c] = old[c] + sum;
    expected_dweight[c] = old[c] + sum_normalized;
    for (int64_t row = 0; row < rows; ++row) {
      expected_dx[row * channels + c] = weight[c] * plain.invstd() *
                                        (gradient(row) - sum / double(rows) -
                                         plain.normalized(row) * sum_normalized / double(rows));
    }
  }
  CHECK(relative_error(sums.to_host(), expected_sums) <= kSums);
  CHECK(relative_error(dweight.to_host(), expected_dweight) <= kSums);
  CHECK(relative_error(dbias.to_host(), expected_dbias) <= kSums);
  CHECK(relative_error(dx.to_host(), expected_dx) <= kSums);
}

TEST_CASE("A mean that is large beside the spread does not cost the variance its digits",
          "[kernels][row100]") {
  const TestDevice d(GENERATE(1, 2));
  const Shape shape{64, 8, 8, 5};
  // A sum of 12 uniform numbers in [-1, 1) has variance 4: half of it is nearly normal.
  Values x(static_cast<size_t>(shape.elements()), Real(1e4));
  for (uint32_t seed = 0; seed < 12; ++seed) {
    const Values uniform = random_values(shape, seed);
    for (size_t i = 0; i < x.size(); ++i) x[i] += uniform[i] / 2;
  }
  const Tensor statistics = d.filled({11}, 0);
  d.kernels().batch_norm_statistics(d.stream, d.put(shape, x), statistics);
  const Values found = statistics.to_host();
  for (int64_t c = 0; c < 5; ++c) {
    const PlainBatchNorm plain(x, 5, c);
    CHECK(plain.m2 / double(plain.x.size()) == Approx(1).epsilon(0.1));
    CHECK(std::abs(found[5 + c] / plain.m2 - 1) <= (kDouble ? 1e-12 : 1e-5));
    CHECK(std::abs(found[c] / plain.mean - 1) <= (kDouble ? 1e-14 : 1e-7));
  }
}

/// x in parts of so many rows; statistics of the whole from those of the parts, [2C+1].
Values merged_statistics(const TestDevice& d, const Values& x, int64_t channels,
                         const std::vector<int64_t>& parts) {
  const Tensor all = d.put({std::ssize(x) / channels, channels}, x);
  const Tensor gathered = d.filled({std::ssize(parts), 2 * channels + 1}, kNaN);
  int64_t first = 0, part = 0;
  for (const int64_t rows : parts) {
    d.kernels().batch_norm_statistics(d.stream, all.rows(first, rows), gathered.rows(part++, 1));
    first += rows;
  }
  const Tensor statistics = d.filled({2 * channels + 1}, kNaN);
  d.kernels().batch_norm_merge(d.stream, gathered, statistics);
  return statistics.to_host();
}

TEST_CASE("Statistics of parts merge into those of the whole batch", "[kernels][row98][row100]") {
  const TestDevice d;
  for (const Real mean : {Real(0), Real(1e4)}) {
    Values x = random_values({12544, 3}, 1);
    for (Real& value : x) value = mean + value * Real(std::sqrt(3.0));  // of spread 1
    for (const std::vector<int64_t>& parts :
         {std::vector<int64_t>{12544}, {3136, 3136, 3136, 3136}, {0, 12000, 0, 1, 543, 0}}) {
      const Values found = merged_statistics(d, x, 3, parts);
      CHECK(found[6] == 12544);
      for (int64_t c = 0; c < 3; ++c) {
        const PlainBatchNorm plain(x, 3, c);
        INFO("mean " << mean << ", " << parts.size() << " parts, channel " << c);
        CHECK(std::abs(found[3 + c] / plain.m2 - 1) <= (kDouble ? 1e-12 : 1e-5));
        CHECK(std::abs(found[c] - plain.mean) <=
              (kDouble ? 1e-12 : 1e-7) * std::max(1., 1. * mean));
      }
    }
  }
}

TEST_CASE("Of no rows there are statistics, and they leave no trace", "[kernels][row101]") {
  const TestDevice d;
  const Values merged = merged_statistics(d, {}, 2, {0, 0});
  CHECK(merged == Values(5, 0));
  const Tensor statistics = d.filled({5}, kNaN), norm = d.filled({5}, kNaN);
  const Tensor mean = d.put({2}, {3, 4}), var = d.put({2}, {5, 6});
  d.kernels().batch_norm_statistics(d.stream, d.put({0, 1, 1, 2}, {}), statistics);
  CHECK(statistics.to_host() == merged);
  d.kernels().batch_norm_prepare(d.stream, statistics, Real(kEps), Real(0.1), mean, var, norm);
  const Real scale = 1 / std::sqrt(Real(kEps));
  CHECK(norm.to_host() == Values{0, 0, scale, scale, 0});
  // A single one has a mean, but no unbiased variance: nothing is remembered of it.
  d.kernels().batch_norm_prepare(d.stream, d.put({5}, {7, 8, 0, 0, 1}), Real(kEps), Real(0.1), mean,
                                 var, norm);
  CHECK(norm.to_host() == Values{7, 8, scale, scale, 1});
  CHECK(mean.to_host() == Values{3, 4});
  CHECK(var.to_host() == Values{5, 6});
}

}  // namespace
}  // namespace lockstep
