// Operations on numbers of 16 bits: each gives what it gives with the same numbers as Real, rounded
// once. Nothing else may differ, so no error bound is needed.

#include <functional>
#include <string>
#include <vector>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/nn_test_support.h"
#include "tests/unit/kernels/kernels_test_support.h"

namespace lockstep {
namespace {

using namespace testing::kernels;
using Catch::Matchers::ContainsSubstring;
using testing::random_values;
using testing::TestDevice;
using Values = std::vector<Real>;

#ifndef LOCKSTEP_DOUBLE  // which computes in float64 alone

Values rounded(Values values, ElementType type) {
  with_numbers(type, [&](auto number) {
    for (Real& value : values) value = Real(decltype(number)(value));
  });
  return values;
}

/// A call of an operation, with tensors of `stored`. Numbers are those of `type` in any case.
struct Trial {
  const TestDevice& d;
  ElementType stored, type;
  struct Given {
    AnyTensor tensor;
    bool rounds;  // what is in it afterwards
  };
  std::vector<Given> given{};

  Kernels& kernels() const { return d.kernels(); }
  AnyTensor in(const Shape& shape, uint32_t seed) const {
    return put(shape, rounded(random_values(shape, seed), type));
  }
  /// An activation that the operation writes.
  AnyTensor out(const Shape& shape) {
    given.push_back({in(shape, 99), true});
    return given.back().tensor;
  }
  /// A sum, or a gradient of parameters: Real always.
  Tensor sum(const Shape& shape, bool rounds = false) {
    const Tensor tensor = d.put(shape, rounded(random_values(shape, 98), type));
    given.push_back({tensor, rounds});
    return tensor;
  }
  Tensor real(const Shape& shape, uint32_t seed) const {
    return d.put(shape, random_values(shape, seed));
  }
  Positions positions(const Shape& shape) const {
    if (stored == kTypeOf<Real>) return IndexTensor::empty(d.stream, shape);
    return BasicTensor<int16_t>::empty(d.stream, shape);
  }

 private:
  AnyTensor put(const Shape& shape, const Values& values) const {
    return with_numbers(stored, [&](auto number) -> AnyTensor {
      using T = decltype(number);
      std::vector<T> all;
      for (const Real value : values) all.push_back(T(value));
      return BasicTensor<T>::from_host(d.stream, shape, all);
    });
  }
};

struct Operation {
  std::string name;
  std::function<void(Trial&)> call;
};

const Shape kImages{3, 6, 4, 7}, kRows{9, 11};

void norm_and_backward(Trial& t, bool relu, bool skip) {
  const int64_t c = kImages[3];
  const AnyTensor x = t.in(kImages, 1), dy = t.in(kImages, 2);
  const Tensor weight = t.real({c}, 3), bias = t.real({c}, 4), norm = t.sum({2 * c + 1});
  t.kernels().batch_norm_measure(t.d.stream, x, Real(1e-5), Real(0.1), t.sum({c}), t.sum({c}),
                                 norm);
  t.kernels().batch_norm_statistics(t.d.stream, x, t.sum({2 * c + 1}));
  t.kernels().batch_norm(t.d.stream, x, norm, weight, bias, skip ? t.in(kImages, 5) : AnyTensor(),
                         relu, t.out(kImages));
  const Tensor sums = t.sum({2, c});
  t.kernels().batch_norm_backward_sums(t.d.stream, x, dy, norm, weight, bias, relu, sums,
                                       t.sum({c}), t.sum({c}));
  t.kernels().batch_norm_backward_input(t.d.stream, x, dy, norm, weight, bias, relu, sums,
                                        t.out(kImages));
}

void pool(Trial& t, int64_t kernel, int64_t stride, bool relu) {
  const Window2d g = make_window("pool", kImages, kImages[3], kImages[3], kernel, stride, 0);
  const Positions where = t.positions(g.output());
  t.kernels().max_pool2d(t.d.stream, g, relu, t.in(kImages, 1), t.out(g.output()), where);
  t.kernels().max_pool2d_backward(t.d.stream, g, t.in(g.output(), 2), where, t.out(kImages));
}

void averages(Trial& t, int64_t height, int64_t width) {
  const Shape few{kImages[0], height, width, kImages[3]};
  t.kernels().adaptive_avg_pool2d(t.d.stream, t.in(kImages, 1), t.out(few));
  t.kernels().adaptive_avg_pool2d_backward(t.d.stream, t.in(few, 2), t.out(kImages));
}

void convolve(Trial& t, const Window2d& g) {
  const AnyTensor x = t.in(g.input(), 1), weight = t.in(g.weight(), 2), dy = t.in(g.output(), 3);
  t.kernels().conv2d(t.d.stream, g, x, weight, t.real({g.out_channels}, 4), t.out(g.output()));
  t.kernels().conv2d_backward_input(t.d.stream, g, dy, weight, t.out(g.input()));
}

/// y of random numbers as log-probabilities.
void softmax(Trial& t) {
  const Tensor y = t.sum(kRows);
  t.kernels().log_softmax(t.d.stream, t.in(kRows, 1), y);
  t.kernels().log_softmax_backward(t.d.stream, y, t.real(kRows, 2), t.out(kRows));
}

const std::vector<Operation> kOperations{
    {"add", [](Trial& t) { t.kernels().add(t.d.stream, t.in(kRows, 1), t.out(kRows)); }},
    {"add to Real", [](Trial& t) { t.kernels().add(t.d.stream, t.in(kRows, 1), t.sum(kRows)); }},
    {"normalize_images",
     [](Trial& t) {
       const auto pixels = ByteTensor::from_host(t.d.stream, {4}, {0, 7, 128, 255});
       t.kernels().normalize_images(t.d.stream, pixels, Real(0.3), Real(0.2), t.out({4}));
     }},
    {"relu",
     [](Trial& t) {
       t.kernels().relu(t.d.stream, t.in(kRows, 1), t.out(kRows));
       t.kernels().relu_backward(t.d.stream, t.in(kRows, 1), t.in(kRows, 2), t.out(kRows));
     }},
    {"channels",
     [](Trial& t) {
       t.kernels().to_channels_first(t.d.stream, t.in(kImages, 1), t.out(kImages));
       t.kernels().to_channels_last(t.d.stream, t.in(kImages, 1), t.out(kImages));
     }},
    {"bias",
     [](Trial& t) {
       for (const bool relu : {false, true}) {
         t.kernels().add_bias(t.d.stream, t.real({kRows[1]}, 1), relu, t.out(kRows));
       }
       t.kernels().add_column_sums(t.d.stream, t.in(kRows, 2), t.sum({kRows[1]}));
     }},
    {"max_pool2d, windows side by side", [](Trial& t) { pool(t, 2, 2, true); }},
    {"max_pool2d, windows that overlap", [](Trial& t) { pool(t, 3, 1, false); }},
    {"averages", [](Trial& t) { averages(t, 4, 2); }},
    {"averages of all", [](Trial& t) { averages(t, 1, 1); }},
    {"batch_norm", [](Trial& t) { norm_and_backward(t, false, false); }},
    {"batch_norm with ReLU", [](Trial& t) { norm_and_backward(t, true, false); }},
    {"batch_norm with skip", [](Trial& t) { norm_and_backward(t, true, true); }},
    {"dropout",
     [](Trial& t) {
       const AnyTensor mask = t.out(kRows);
       t.kernels().dropout_mask(t.d.stream, t.d.state({}), {.seed = 1}, Real(0.5), mask);
       t.kernels().apply_mask(t.d.stream, t.in(kRows, 1), mask, t.out(kRows));
     }},
    {"log_softmax", softmax},
    {"convolution", [](Trial& t) { convolve(t, window(2, 7, 6, 3, 5, 3, 2, 1)); }},
    {"convolution of few channels",
     [](Trial& t) { convolve(t, window(16, 9, 9, 1, 10, 5, 1, 0)); }},
    {"matmul",
     [](Trial& t) {
       const MatMul ab{
           .m = 5, .n = 6, .k = 40, .transpose_a = false, .transpose_b = true, .accumulate = false};
       t.kernels().matmul(t.d.stream, ab, t.in({5, 40}, 1), t.in({6, 40}, 2), t.out({5, 6}));
     }},
};

TEST_CASE("An operation on numbers of 16 bits is that on Real numbers, rounded once",
          "[kernels][sixteen]") {
  const TestDevice d(GENERATE(1, 2));
  for (const ElementType type : {ElementType::bf16, ElementType::fp16}) {
    for (const Operation& operation : kOperations) {
      INFO(operation.name << " in " << name_of(type));
      Trial sixteen{d, type, type}, real{d, kTypeOf<Real>, type};
      operation.call(sixteen);
      operation.call(real);
      REQUIRE(sixteen.given.size() == real.given.size());
      for (size_t i = 0; i < real.given.size(); ++i) {
        const Values expected = real.given[i].tensor.to_host();
        INFO("result " << i);
        CHECK(sixteen.given[i].tensor.to_host() ==
              (real.given[i].rounds ? rounded(expected, type) : expected));
      }
    }
  }
}

TEST_CASE("A gradient of weights is rounded once, and then added in float32",
          "[kernels][sixteen]") {
  const TestDevice d;
  for (const ElementType type : {ElementType::bf16, ElementType::fp16}) {
    const Window2d g = window(4, 8, 8, 3, 5, 3, 1, 1);
    const Values before = random_values(g.weight(), 7);
    // [0]: from zeros in Real; [1]: from `before` in 16 bits.
    Values of_conv[2], of_bias[2], of_product[2];
    for (const bool sixteen : {false, true}) {
      Trial t{d, sixteen ? type : kTypeOf<Real>, type};
      const Tensor dweight = sixteen ? d.put(g.weight(), before) : d.filled(g.weight(), 0);
      const Tensor dbias = d.filled({5}, 0);
      t.kernels().conv2d_backward_parameters(d.stream, g, t.in(g.input(), 1), t.in(g.output(), 2),
                                             dweight, dbias);
      of_conv[sixteen] = dweight.to_host(), of_bias[sixteen] = dbias.to_host();
      const MatMul product{
          .m = 5, .n = 27, .k = 64, .transpose_a = true, .transpose_b = false, .accumulate = true};
      const Tensor sum = sixteen ? d.put(g.weight(), before) : d.filled(g.weight(), 0);
      t.kernels().matmul(d.stream, product, t.in({64, 5}, 3), t.in({64, 27}, 4), sum);
      of_product[sixteen] = sum.to_host();
    }
    const auto added = [&](const Values& gradient) {
      Values sum = rounded(gradient, type);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] = before[i] + sum[i];
      return sum;
    };
    INFO(name_of(type));
    CHECK(of_conv[1] == added(of_conv[0]));
    CHECK(rounded(of_conv[0], type) != of_conv[0]);
    CHECK(of_bias[1] == of_bias[0]);  // a sum, not a product: nothing rounds it
    CHECK(of_product[1] == added(of_product[0]));
  }
}

TEST_CASE("An empty product is zeros, or adds nothing", "[kernels][sixteen]") {
  const TestDevice d;
  Trial t{d, ElementType::bf16, ElementType::bf16};
  MatMul none{
      .m = 2, .n = 3, .k = 0, .transpose_a = false, .transpose_b = false, .accumulate = false};
  const AnyTensor c = t.out({2, 3});
  t.kernels().matmul(d.stream, none, t.in({2, 0}, 1), t.in({0, 3}, 2), c);
  CHECK(c.to_host() == Values(6, 0));
  none.accumulate = true;
  const Tensor sum = d.filled({2, 3}, 5);
  t.kernels().matmul(d.stream, none, t.in({2, 0}, 1), t.in({0, 3}, 2), sum);
  CHECK(sum.to_host() == Values(6, 5));
}

TEST_CASE("Predictions are counted from scores of 16 bits", "[kernels][sixteen]") {
  const TestDevice d;
  const auto scores = Bf16Tensor::from_host(
      d.stream, {2, 3}, {Bf16(1), Bf16(3), Bf16(2), Bf16(5), Bf16(5), Bf16(-1)});
  const CountTensor count = CountTensor::from_host(d.stream, {1}, {0});
  d.kernels().count_correct(d.stream, scores, d.labels({1, 1}), count);
  CHECK(count.to_host() == std::vector<int64_t>{1});  // of equals the first
}

TEST_CASE("Numbers of another type are refused, by the types' names", "[kernels][sixteen]") {
  const TestDevice d;
  const Trial bf16{d, ElementType::bf16, ElementType::bf16},
      fp16{d, ElementType::fp16, ElementType::fp16};
  const AnyTensor x = bf16.in({4}, 1), y = fp16.in({4}, 1);
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { d.kernels().relu(d.stream, x, y); }, [&] { d.kernels().add(d.stream, x, y); }}) {
    CHECK_THAT(testing::message_of<BadInput>(call), ContainsSubstring("[4] has numbers of type") &&
                                                        ContainsSubstring("bf16") &&
                                                        ContainsSubstring("fp16"));
  }
  CHECK_THAT(testing::message_of<BadInput>([&] { d.kernels().scale(d.stream, 2, x); }),
             ContainsSubstring("type bf16, expected f32"));
}

#endif

// --- The scale of the loss -----------------------------------------------------------------------

TEST_CASE("The scale follows GradScaler's rule, step for step", "[kernels][sixteen]") {
  const TestDevice d;
  const auto health = HealthTensor::from_host(d.stream, {}, {Health{.scale = 1024}});
  const auto step = [&](int64_t number, bool overflow) {
    const StepStateTensor state = d.state({.step = number});
    const Tensor gradient = d.put({3}, {2048, overflow ? kInfinity : 0, -1});
    d.kernels().unscale(d.stream, state, health, gradient);
    if (!overflow) CHECK(gradient.to_host()[0] * health.to_host()[0].scale == 2048);
    const bool skipped = health.to_host()[0].skipped_step == number;
    d.kernels().update_scale(d.stream, /*growth_interval=*/3, health);
    return skipped;
  };
  // torch.amp.GradScaler(init_scale=1024, growth_interval=3): its scale and growth tracker.
  struct Expected {
    bool overflow;
    Real scale;
    int64_t good_steps;
  };
  int64_t number = 0, skipped = 0;
  for (const Expected& e :
       {Expected{false, 1024, 1}, Expected{false, 1024, 2}, Expected{false, 2048, 0},
        Expected{true, 1024, 0}, Expected{true, 512, 0}, Expected{false, 512, 1},
        Expected{false, 512, 2}, Expected{true, 256, 0}, Expected{false, 256, 1},
        Expected{false, 256, 2}, Expected{false, 512, 0}}) {
    INFO("step " << number);
    CHECK(step(number++, e.overflow) == e.overflow);
    skipped += e.overflow;
    const Health now = health.to_host()[0];
    CHECK(now.scale == e.scale);
    CHECK(now.good_steps == e.good_steps);
    CHECK(now.skipped == skipped);
    CHECK(now.failed_step == -1);
  }
}

}  // namespace
}  // namespace lockstep
