// Operations on numbers of 16 bits: each gives what it gives with the same numbers as Real, rounded
// once. Nothing else may differ, so no error bound is needed.

#include <functional>
#include <string>
#include <vector>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/sixteen_operations.h"
#include "tests/unit/kernels/kernels_test_support.h"

namespace lockstep {
namespace {

using namespace testing::kernels;
using namespace testing::sixteen;
using Catch::Matchers::ContainsSubstring;
using testing::random_values;
using testing::TestDevice;
using Values = std::vector<Real>;

#ifndef LOCKSTEP_DOUBLE  // which computes in float64 alone

TEST_CASE("An operation on numbers of 16 bits is that on Real numbers, rounded once",
          "[kernels][sixteen]") {
  const TestDevice d(GENERATE(1, 2));
  for (const Operation& operation : kOperations) {
    each_result(d, operation, kUneven,
                [](const Values& found, const Values& expected) { CHECK(found == expected); });
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
      Trial t{d, sixteen ? type : kTypeOf<Real>, type, kUneven};
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
  Trial t{d, ElementType::bf16, ElementType::bf16, kUneven};
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
  const Trial bf16{d, ElementType::bf16, ElementType::bf16, kUneven},
      fp16{d, ElementType::fp16, ElementType::fp16, kUneven};
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
