// Operations of kernels/kernels.h against a plain computation on the host, on odd shapes: element
// by element, and loss. What is shared out over compute threads runs with one thread and with two:
// 16384 elements are the least that a second thread is woken for.

#include <type_traits>

#include "common/core/error.h"
#include "common/kernels/kernels.h"

#include "tests/support/catch.h"
#include "tests/support/nn_test_support.h"
#include "tests/unit/kernels/kernels_test_support.h"

namespace lockstep {
namespace {

using namespace testing::kernels;
using testing::random_values;
using testing::relative_error;
using testing::TestDevice;
using Values = std::vector<Real>;
using Doubles = std::vector<double>;

// --- Element by element ------------------------------------------------------------------------

TEST_CASE("Fill, add and scale are what their names say", "[kernels]") {
  const TestDevice d(GENERATE(1, 2));
  const Shape shape{67, 7, 5, 9};
  const Values a = random_values(shape, 1), b = random_values(shape, 2);
  const Tensor x = d.put(shape, a), y = d.put(shape, b);
  Values sum = b, scaled = b;
  for (size_t i = 0; i < a.size(); ++i) {
    sum[i] = b[i] + a[i];
    scaled[i] = sum[i] * Real(0.3);
  }
  d.kernels().add(d.stream, x, y);
  CHECK(y.to_host() == sum);
  d.kernels().scale(d.stream, Real(0.3), y);
  CHECK(y.to_host() == scaled);
  d.kernels().fill(d.stream, Real(-2.5), y);
  CHECK(y.to_host() == Values(a.size(), Real(-2.5)));
  const CountTensor count = CountTensor::from_host(d.stream, {3}, {1, 2, 3});
  d.kernels().fill_count(d.stream, int64_t{1} << 40, count);
  CHECK(count.to_host() == std::vector<int64_t>(3, int64_t{1} << 40));
}

TEST_CASE("To bf16 a number is multiplied, then rounded once; back it keeps its value",
          "[kernels][sixteen]") {
  const TestDevice d(GENERATE(1, 2));
  const Shape shape{20011};
  Values values = random_values(shape, 1);
  values[0] = kNaN, values[1] = -kInfinity, values[2] = Real(0x1.01p0), values[3] = Real(0x1.03p0);
  const Bf16Tensor half = Bf16Tensor::from_host(d.stream, shape, std::vector<Bf16>(20011));
  const Tensor back = d.filled(shape, kNaN);
  for (const Real factor : {Real(1), Real(1) / 3}) {
    d.kernels().to_sixteen_bits(d.stream, factor, d.put(shape, values), half);
    d.kernels().from_sixteen_bits(d.stream, half, back);
    const std::vector<Bf16> found = half.to_host();
    const Values found_back = back.to_host();
    int64_t wrong = 0;
    for (size_t i = 1; i < values.size(); ++i) {
      const Real product = values[i] * factor;
      wrong += found[i].bits != Bf16(float(product)).bits;
      wrong += found_back[i] != Real(found[i]);
    }
    CHECK(wrong == 0);
    CHECK(found[0].bits == 0x7fc0);
    CHECK(std::isnan(found_back[0]));
    if (factor == 1)
      CHECK((found[2].bits == 0x3f80 && found[3].bits == 0x3f82));  // to the even one
  }
}

TEST_CASE("Images are normalised bitwise as (byte / 255 - mean) / stddev", "[kernels]") {
  const TestDevice d;
  std::vector<uint8_t> bytes(256);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i);
  const ByteTensor x = ByteTensor::from_host(d.stream, {256}, bytes);
  const Tensor y = d.filled({256}, 0);
  for (const auto& [mean, stddev] : {std::pair<Real, Real>{Real(0.1307), Real(0.3081)},
                                     std::pair<Real, Real>{Real(0.5), Real(0.5)}}) {
    d.kernels().normalize_images(d.stream, x, mean, stddev, y);
    Values expected;
    for (const uint8_t byte : bytes) {
      const Real share = Real(byte) / 255;  // one rounding a line: no fused operation here
      const Real centred = share - mean;
      expected.push_back(centred / stddev);
    }
    CHECK(y.to_host() == expected);
  }
}

TEST_CASE("ReLU cuts negative numbers and lets NaN through", "[kernels]") {
  const TestDevice d;
  const Tensor x = d.put({6}, {-1, 0, 2, -kInfinity, kInfinity, kNaN}), y = d.filled({6}, 7);
  d.kernels().relu(d.stream, x, y);
  Values found = y.to_host();
  CHECK(std::isnan(found[5]));
  found.pop_back();
  CHECK(found == Values{0, 0, 2, 0, kInfinity});

  const Shape shape{20011};
  const Values z = random_values(shape, 3), slope = random_values(shape, 4);
  Values expected = slope;
  for (size_t i = 0; i < z.size(); ++i) expected[i] = z[i] > 0 ? slope[i] : 0;
  const Tensor dx = d.filled(shape, kNaN);
  d.kernels().relu_backward(d.stream, d.put(shape, z), d.put(shape, slope), dx);
  CHECK(dx.to_host() == expected);
  // The slope at 0 is 0.
  const Tensor at_zero = d.put({1}, {0});
  d.kernels().relu_backward(d.stream, at_zero, d.put({1}, {5}), at_zero);
  CHECK(at_zero.to_host() == Values{0});
}

TEST_CASE("Channels move first and back to last", "[kernels]") {
  const TestDevice d(GENERATE(1, 2));
  const Shape nhwc{31, 7, 5, 17};
  const Values values = random_values(nhwc, 1);
  const Tensor first = d.filled({31, 17, 7, 5}, 0), last = d.filled(nhwc, 0);
  d.kernels().to_channels_first(d.stream, d.put(nhwc, values), first);
  d.kernels().to_channels_last(d.stream, first, last);
  const Values found = first.to_host();
  int64_t wrong = 0;
  for (int64_t i = 0; i < nhwc.elements(); ++i) {
    const int64_t c = i % 17, w = i / 17 % 5, h = i / 85 % 7, n = i / 595;
    wrong += found[((n * 17 + c) * 7 + h) * 5 + w] != values[i];
  }
  CHECK(wrong == 0);
  CHECK(last.to_host() == values);
}

TEST_CASE("A bias is added to every row, and its gradient is the sum of the rows", "[kernels]") {
  const TestDevice d(GENERATE(1, 2));
  const int64_t rows = 1801, features = 11;
  const Values x = random_values({rows, features}, 1), bias = random_values({features}, 2);
  Values plain = x;
  Doubles sums(bias.begin(), bias.end());  // the gradient is ADDED to the old value
  for (int64_t i = 0; i < rows * features; ++i) {
    plain[i] = x[i] + bias[i % features];
    sums[i % features] += x[i];
  }
  const Tensor y = d.put({rows, features}, x), b = d.put({features}, bias);
  d.kernels().add_bias(d.stream, b, /*relu=*/false, y);
  CHECK(y.to_host() == plain);
  y.copy_from_host(x);
  d.kernels().add_bias(d.stream, b, /*relu=*/true, y);
  CHECK(y.to_host() == with_each(plain, [](Real v) { return std::max(v, Real(0)); }));
  d.kernels().add_column_sums(d.stream, d.put({rows, features}, x), b);
  CHECK(relative_error(b.to_host(), sums) <= kSums);
}

// --- Loss and metrics ----------------------------------------------------------------------------

TEST_CASE("Log-softmax and its gradient are what their formulas say", "[kernels]") {
  const TestDevice d;
  const int64_t rows = 13, classes = 7;
  const Shape shape{rows, classes};
  const Values x = with_each(random_values(shape, 1), [](Real v) { return 6 * v; });
  const Values dy = random_values(shape, 2);
  Doubles expected(x.size()), expected_dx(x.size());
  for (int64_t n = 0; n < rows; ++n) {
    double sum = 0, slopes = 0;
    for (int64_t k = 0; k < classes; ++k) {
      sum += std::exp(double(x[n * classes + k]));
      slopes += dy[n * classes + k];
    }
    for (int64_t i = n * classes; i < (n + 1) * classes; ++i) {
      expected[i] = x[i] - std::log(sum);
      expected_dx[i] = dy[i] - std::exp(double(x[i])) / sum * slopes;
    }
  }
  const Tensor y = d.filled(shape, kNaN), dx = d.filled(shape, kNaN);
  d.kernels().log_softmax(d.stream, d.put(shape, x), y);
  d.kernels().log_softmax_backward(d.stream, y, d.put(shape, dy), dx);
  CHECK(relative_error(y.to_host(), expected) <= kRounding);
  CHECK(relative_error(dx.to_host(), expected_dx) <= kRounding);
}

TEST_CASE("Log-softmax, its loss and its gradient stay finite for logits of +-1e4",
          "[kernels][row19]") {
  const TestDevice d;
  const Tensor y = d.filled({3, 3}, 0), dx = d.filled({3, 3}, 0), loss = d.filled({1}, 0);
  const Real t = Real(1e4);
  d.kernels().log_softmax(d.stream, d.put({3, 3}, {t, -t, 0, -t, -t, -t, t, t, -t}), y);
  const double third = std::log(1.0 / 3), half = std::log(0.5);
  const Doubles expected{0, -2e4, -1e4, third, third, third, half, half, half - 2e4};
  CHECK(relative_error(y.to_host(), expected) <= kRounding);
  const StepStateTensor state = d.state({.loss_weight = Real(1) / 3});
  const LabelTensor labels = d.labels({1, 0, 2});  // the worst class of rows 0 and 2
  d.kernels().nll_loss(d.stream, state, y, labels, loss);
  CHECK(loss.to_host()[0] == Approx((4e4 - third - half) / 3).epsilon(1e-6));
  d.kernels().nll_loss_backward(d.stream, state, labels, dx);
  d.kernels().log_softmax_backward(d.stream, y, dx, dx);
  const double s = 1.0 / 3;
  const Doubles slopes{s, -s, 0, s * s - s, s * s, s * s, s / 2, s / 2, -s};
  CHECK(relative_error(dx.to_host(), slopes) <= kRounding);
}

TEST_CASE("The NLL loss adds up with the weight of a sample", "[kernels]") {
  const TestDevice d;
  const Values scores{-1, -2, -3, -4, -5, -6, -7, -8};
  const LabelTensor labels = d.labels({1, 0, 1, 0});
  const Tensor loss = d.put({1}, {Real(0.5)}), dx = d.filled({4, 2}, kNaN);
  const StepStateTensor state = d.state({.loss_weight = Real(0.125)});
  d.kernels().nll_loss(d.stream, state, d.put({4, 2}, scores), labels, loss);
  CHECK(loss.to_host()[0] == Real(0.5 + 0.125 * (2 + 3 + 6 + 7)));
  d.kernels().nll_loss_backward(d.stream, state, labels, dx);
  const Real w = Real(-0.125);
  CHECK(dx.to_host() == Values{0, w, w, 0, 0, w, w, 0});
}

TEST_CASE("Correct answers are counted, the first of equal scores being the answer", "[kernels]") {
  const TestDevice d;
  const Tensor scores = d.put({5, 3}, {1, 3, 2,     //
                                       5, 5, 5,     // equal: class 0
                                       0, 4, 4,     // equal: class 1
                                       -3, -2, -1,  //
                                       9, 8, 7});
  const CountTensor count = CountTensor::from_host(d.stream, {1}, {100});
  d.kernels().count_correct(d.stream, scores, d.labels({1, 0, 1, 2, 0}), count);
  CHECK(count.to_host()[0] == 105);
  d.kernels().count_correct(d.stream, scores, d.labels({0, 1, 2, 2, 1}), count);
  CHECK(count.to_host()[0] == 106);
}

}  // namespace
}  // namespace lockstep
