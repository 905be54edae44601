// The optimizer's operations against a plain computation on the host.
// What is shared out over compute threads runs with one thread and with more.

#include <cmath>
#include <limits>

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

TEST_CASE("The first step with a NaN or an infinity is recorded, wherever it stands", "[kernels]") {
  const TestDevice d;
  const int64_t n = 1003;
  for (const Real bad : {kNaN, kInfinity, -kInfinity}) {
    for (const int64_t at : {int64_t{0}, n / 2, n - 1}) {
      Values x = random_values({n}, 1);
      const HealthTensor health = HealthTensor::from_host(d.stream, {}, {Health{}});
      const auto check = [&](int64_t step) {
        d.kernels().check_finite(d.stream, d.state({.step = step}), d.put({n}, x), health);
        return health.to_host()[0].failed_step;
      };
      x[n / 3] = std::numeric_limits<Real>::max();
      CHECK(check(4) == -1);
      x[at] = bad;
      CHECK(check(5) == 5);
      CHECK(check(6) == 5);
      x[at] = 0;
      CHECK(check(7) == 5);
    }
  }
}

TEST_CASE("SGD follows PyTorch's rule over five steps", "[kernels]") {
  const TestDevice d(GENERATE(1, 2));
  const Shape shape{20011};
  const double momentum = GENERATE(0.0, 0.9), decay = GENERATE(0.0, 0.01);
  const SgdRule rule{.momentum = Real(momentum), .weight_decay = Real(decay)};
  const Values start = random_values(shape, 1);
  Doubles w(start.begin(), start.end()), v(w.size());
  const Tensor weight = d.put(shape, start), gradient = d.filled(shape, 0);
  const Tensor velocity = momentum > 0 ? d.filled(shape, 0) : Tensor();
  const HealthTensor health = HealthTensor::from_host(d.stream, {}, {Health{}});
  for (uint32_t step = 0; step < 5; ++step) {
    const double rate = 0.1 / (step + 1);
    const Values g = random_values(shape, 10 + step);
    for (size_t i = 0; i < w.size(); ++i) {
      v[i] = momentum * v[i] + g[i] + decay * w[i];
      w[i] -= rate * v[i];
    }
    gradient.copy_from_host(g);
    d.kernels().sgd_update(d.stream, d.state({.step = step, .learning_rate = Real(rate)}), health,
                           d.one_owner(20011), rule, gradient, velocity, weight);
  }
  CHECK(relative_error(weight.to_host(), w) <= kRounding);
  if (momentum > 0) CHECK(relative_error(velocity.to_host(), v) <= kRounding);
}

TEST_CASE("SGD reproduces weights recorded from PyTorch", "[kernels]") {
  // torch.optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01) on float64
  const TestDevice d;
  const Tensor weight = d.put({3}, {1, -2, Real(0.5)}), velocity = d.filled({3}, 0);
  const HealthTensor health = HealthTensor::from_host(d.stream, {}, {Health{}});
  const SgdRule rule{.momentum = Real(0.9), .weight_decay = Real(0.01)};
  for (int t = 0; t < 5; ++t) {
    const Values g{Real(0.5 * (t + 1)), Real(-0.25), Real(0.125 * (t - 2))};
    d.kernels().sgd_update(d.stream, d.state({.step = t, .learning_rate = Real(0.1)}), health,
                           d.one_owner(3), rule, d.put({3}, g), velocity, weight);
  }
  const Doubles recorded{-0.5957379871714513, -1.645945769412173, 0.5895292102218245};
  CHECK(relative_error(weight.to_host(), recorded) <= kRounding);
}

TEST_CASE("SGD leaves weights and velocity alone once training has failed", "[kernels]") {
  const TestDevice d;
  const Values w = random_values({100}, 1), v = random_values({100}, 2);
  const Tensor weight = d.put({100}, w), velocity = d.put({100}, v);
  const HealthTensor health = HealthTensor::from_host(d.stream, {}, {Health{.failed_step = 0}});
  d.kernels().sgd_update(d.stream, d.state({.step = 1, .learning_rate = 1}), health,
                         d.one_owner(100), {.momentum = Real(0.5)}, d.filled({100}, kNaN), velocity,
                         weight);
  d.kernels().sgd_update(d.stream, d.state({.step = 2, .learning_rate = 1}), health,
                         d.one_owner(100), {}, d.filled({100}, 1), Tensor(), weight);
  CHECK(weight.to_host() == w);
  CHECK(velocity.to_host() == v);
}

struct AdamBuffers {
  AdamBuffers(const TestDevice& d, const Shape& shape, const Values& start)
      : weight(d.put(shape, start)),
        exp_avg(d.filled(shape, 0)),
        exp_avg_sq(d.filled(shape, 0)),
        owners(d.one_owner(shape.elements())) {
    d.kernels().fill_count(d.stream, 0, steps);
  }
  void step(const TestDevice& d, int64_t step, double rate, const AdamRule& rule, const Values& g,
            int64_t failed_step = -1) const {
    const HealthTensor health = HealthTensor::from_host(d.stream, {}, {Health{failed_step}});
    const StepStateTensor state = d.state({.step = step, .learning_rate = Real(rate)});
    d.kernels().adam_count(d.stream, state, health, owners.marks, rule, steps, factors);
    d.kernels().adam_update(d.stream, state, health, owners, rule, factors,
                            d.put(weight.shape(), g), exp_avg, exp_avg_sq, weight);
  }
  Tensor weight, exp_avg, exp_avg_sq;
  Owners owners;
  CountTensor steps = CountTensor::empty(weight.home(), {1});
  Tensor factors = Tensor::empty(weight.home(), {1, 2});
};

TEST_CASE("Adam and AdamW follow PyTorch's rule over six steps", "[kernels]") {
  const TestDevice d(GENERATE(1, 2));
  const Shape shape{20011};
  const bool decoupled = GENERATE(false, true);
  const double decay = GENERATE(0.0, 0.1);
  const AdamRule rule{.beta1 = 0.8, .eps = 1e-3, .weight_decay = decay, .decoupled = decoupled};
  const Values start = random_values(shape, 1);
  Doubles w(start.begin(), start.end()), m(w.size()), v(w.size());
  const AdamBuffers adam(d, shape, start);
  for (int t = 1; t <= 6; ++t) {
    const double rate = 0.1 / t;
    const Values gradient = random_values(shape, 10 + static_cast<uint32_t>(t));
    for (size_t i = 0; i < w.size(); ++i) {
      const double g = gradient[i] + (decoupled ? 0 : decay * w[i]);
      if (decoupled) w[i] *= 1 - rate * decay;
      m[i] = 0.8 * m[i] + 0.2 * g;
      v[i] = 0.999 * v[i] + 0.001 * g * g;
      w[i] -= rate * (m[i] / (1 - std::pow(0.8, t))) /
              (std::sqrt(v[i] / (1 - std::pow(0.999, t))) + 1e-3);
    }
    adam.step(d, t - 1, rate, rule, gradient);
  }
  CHECK(relative_error(adam.weight.to_host(), w) <= kRounding);
  CHECK(relative_error(adam.exp_avg.to_host(), m) <= kRounding);
  CHECK(relative_error(adam.exp_avg_sq.to_host(), v) <= kRounding);
}

TEST_CASE("Adam and AdamW reproduce numbers recorded from PyTorch", "[kernels]") {
  // torch.optim.Adam and AdamW(lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1) on float64
  const TestDevice d;
  struct Recorded {
    bool decoupled;
    Doubles weight, exp_avg, exp_avg_sq;
  };
  for (const Recorded& recorded :
       {Recorded{false,
                 {0.5020863862667084, -1.5028530165812308, 0.6353418436626875},
                 {1.2063496541253627, -0.2862219240949387, 0.08114336527263342},
                 {0.7096305808667418, 0.04168837888185379, 0.00897117281124209}},
        Recorded{true,
                 {0.46562493568422564, -1.4138331864533864, 0.7134725206617746},
                 {1.1553599999999997, -0.16807999999999998, 0.03671999999999999},
                 {0.6570813281250005, 0.014138691406250011, 0.007082343750000006}}}) {
    const AdamRule rule{.beta1 = 0.8,
                        .beta2 = 0.95,
                        .eps = 1e-3,
                        .weight_decay = 0.1,
                        .decoupled = recorded.decoupled};
    const AdamBuffers adam(d, {3}, {1, -2, Real(0.5)});
    for (int t = 0; t < 5; ++t) {
      adam.step(d, t, 0.1, rule, {Real(0.5 * (t + 1)), Real(-0.25), Real(0.125 * (t - 2))});
    }
    CHECK(relative_error(adam.weight.to_host(), recorded.weight) <= kRounding);
    CHECK(relative_error(adam.exp_avg.to_host(), recorded.exp_avg) <= kRounding);
    CHECK(relative_error(adam.exp_avg_sq.to_host(), recorded.exp_avg_sq) <= kRounding);
  }
}

TEST_CASE("Adam leaves weights and moments alone once training has failed", "[kernels]") {
  const TestDevice d;
  const Values start = random_values({100}, 1), zeros(100, 0);
  const AdamBuffers adam(d, {100}, start);
  adam.step(d, 1, 1, {}, Values(100, kNaN), 0);
  adam.step(d, 2, 1, {}, Values(100, 1), 0);
  CHECK(adam.steps.to_host()[0] == 0);
  CHECK(adam.weight.to_host() == start);
  CHECK(adam.exp_avg.to_host() == zeros);
  CHECK(adam.exp_avg_sq.to_host() == zeros);
}

/// 40,000 numbers of three parameters, the second without a gradient.
struct ThreeOwners {
  explicit ThreeOwners(const TestDevice& d)
      : owners{
            BasicTensor<Stretch>::from_host(d.stream, {3}, {{30'000, 2}, {30'001, 1}, {kAll, 0}}),
            d.put({3}, {Real(0.25), 0, 1})} {}
  static bool has_gradient(int64_t i) { return i != 30'000; }
  static constexpr int64_t kAll = 40'000;
  Owners owners;
};

TEST_CASE("An update passes over the numbers of a parameter without a gradient", "[kernels]") {
  const TestDevice d(GENERATE(1, 2, 3));
  const ThreeOwners three(d);
  const HealthTensor health = HealthTensor::from_host(d.stream, {}, {Health{}});
  const StepStateTensor state = d.state({.learning_rate = Real(0.5)});
  const Shape shape{three.kAll};
  const auto moved = [&](const Tensor& x, const Values& before) {
    const Values now = x.to_host();
    for (int64_t i = 0; i < three.kAll; ++i) {
      if ((now[size_t(i)] != before[size_t(i)]) != three.has_gradient(i)) return false;
    }
    return true;
  };
  const Values ones(three.kAll, 1);
  for (const Real momentum : {Real(0), Real(0.5)}) {
    const Tensor weight = d.filled(shape, 1), velocity = d.filled(shape, 1);
    d.kernels().sgd_update(d.stream, state, health, three.owners,
                           {.momentum = momentum, .weight_decay = Real(0.5)}, d.filled(shape, 1),
                           momentum > 0 ? velocity : Tensor(), weight);
    CHECK(moved(weight, ones));
    if (momentum > 0) CHECK(moved(velocity, ones));
  }
  const Tensor weight = d.filled(shape, 1), exp_avg = d.filled(shape, 3),
               square = d.filled(shape, 3);
  const CountTensor steps = CountTensor::from_host(d.stream, {3}, {4, 5, 6});
  const Tensor factors = d.filled({3, 2}, kNaN);
  const AdamRule rule{.weight_decay = 0.5, .decoupled = true};
  d.kernels().adam_count(d.stream, state, health, three.owners.marks, rule, steps, factors);
  CHECK(steps.to_host() == std::vector<int64_t>{5, 5, 7});
  d.kernels().adam_update(d.stream, state, health, three.owners, rule, factors, d.filled(shape, 1),
                          exp_avg, square, weight);
  CHECK(moved(weight, ones));
  CHECK(moved(exp_avg, Values(three.kAll, 3)));
  CHECK(moved(square, Values(three.kAll, 3)));
  const Values after = weight.to_host();  // each parameter's own step counts
  const auto expected = [&](int t) {
    const double m = 0.9 * 3 + 0.1, v = 0.999 * 3 + 0.001;
    return 0.75 - 0.5 / (1 - std::pow(0.9, t)) * m / (std::sqrt(v / (1 - std::pow(0.999, t))));
  };
  CHECK(after.front() == Approx(expected(7)));
  CHECK(after.back() == Approx(expected(5)));
}

TEST_CASE("A number is poisoned once training has failed, and only the first", "[kernels]") {
  const TestDevice d;
  for (const int64_t failed_step : {int64_t{-1}, int64_t{0}, int64_t{7}}) {
    const Tensor x = d.put({3}, {1, 2, 3});
    d.kernels().poison(d.stream, HealthTensor::from_host(d.stream, {}, {Health{failed_step}}), x);
    const Values found = x.to_host();
    CHECK(std::isnan(found[0]) == (failed_step >= 0));
    if (failed_step < 0) CHECK(found[0] == 1);
    CHECK(found[1] == 2);
    CHECK(found[2] == 3);
  }
}

TEST_CASE("Gradients are clipped together, as torch.nn.utils.clip_grad_norm_ does", "[kernels]") {
  const TestDevice d;
  for (const int64_t n : {int64_t{1}, int64_t{5}, Kernels::kSumPart, 2 * Kernels::kSumPart + 3}) {
    const Values values = random_values({n}, 7);
    double sum = 0;
    for (const Real value : values) sum += double(value) * double(value);
    const double length = std::sqrt(sum);
    for (const double most : {length / 3, 2 * length}) {
      INFO(n << " numbers, at most " << most);
      const Tensor x = d.put({n}, values);
      const Tensor sums = d.filled({1 + (n + Kernels::kSumPart - 1) / Kernels::kSumPart}, kNaN);
      d.kernels().sum_squares(d.stream, x, sums);
      CHECK(double(sums.to_host()[0]) == Approx(sum).epsilon(testing::kTolerance));
      CHECK(x.to_host() == values);
      d.kernels().clip_to_norm(d.stream, Real(most), sums, x);
      Doubles expected(values.begin(), values.end());
      for (double& value : expected) value *= std::min(1.0, most / (length + 1e-6));
      CHECK(relative_error(x.to_host(), expected) <= testing::kTolerance);
    }
  }
  // PyTorch adds 1e-6 to the length, which shows if the length is small.
  const Tensor tiny = d.put({2}, {Real(3e-6), Real(4e-6)});
  d.kernels().clip_to_norm(d.stream, Real(1e-6), d.put({1}, {Real(25e-12)}), tiny);
  CHECK(relative_error(tiny.to_host(), Doubles{3e-6 / 6, 4e-6 / 6}) <= testing::kTolerance);
  const Tensor spoilt = d.put({3}, {1, kNaN, 2});
  const Tensor sums = d.filled({2}, 0);
  d.kernels().sum_squares(d.stream, spoilt, sums);
  d.kernels().clip_to_norm(d.stream, 1, sums, spoilt);
  for (const Real value : spoilt.to_host()) CHECK(std::isnan(value));  // the watch will see it
}

}  // namespace
}  // namespace lockstep
