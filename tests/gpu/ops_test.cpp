// Operations of kernels/kernels.h on a GPU against the reference engine on the CPU: relative L2
// 1e-4 at most, equal where there is nothing to round. Those of layers are in layer_ops_test.cpp.
// The name of a case begins with the operations that it tests; tests/tools/test_gpu_ops.py finds
// operations that no case names.
//
// `[&, rows = rows]`: clang++ captures the names of a pair's halves by themselves from 16 on.

#include <bit>
#include <cmath>
#include <type_traits>

#include "tests/gpu/gpu_test_support.h"
#include "tests/gpu/ops_test_support.h"

namespace lockstep {
namespace {

using namespace testing::ops;
using testing::Both;
using testing::random_values;
using testing::Run;
using Values = std::vector<Real>;

// --- Element by element ------------------------------------------------------------------------

TEST_CASE("fill, fill_count: every element and none beside it", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const int64_t n : kSizes) {
    both.agree([&](Run& run) {
      const Tensor y = run.output({n});
      run.ops.fill(run.stream, Real(-2.5), y);
      run.result("fill", y, kEqual);
      const CountTensor count = run.put({n}, std::vector<int64_t>(n, 7));
      run.ops.fill_count(run.stream, int64_t{1} << 40, count);
      run.result("fill_count", count, kEqual);
    });
  }
}

TEST_CASE("add, scale, relu, relu_backward: one operation per element, NaN stays NaN",
          "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  std::vector<int64_t> sizes = kSizes;
  // More than twice the packs that all threads of a GPU hold; on the model 70001 are.
  if (!testing::is_model(*both.gpu_device)) sizes.push_back(2'500'003);
  for (const int64_t n : sizes) {
    for (const int64_t shift : {0, 1}) {  // views may begin anywhere
      INFO(n << " elements, shift " << shift);
      both.agree(
          [&](Run& run) {
            const Tensor x = run.put({n}, with_special(random_values({n}, 1)));
            const Tensor y = run.random({n}, 2), z = run.output({n});
            run.ops.add(run.stream, x, y);
            run.result("add", y, kEqual);
            run.ops.scale(run.stream, Real(0.3), y);
            run.result("scale", y, kEqual);
            run.ops.relu(run.stream, x, z);
            run.result("relu", z, kEqual);
            run.ops.relu_backward(run.stream, x, run.random({n}, 3), z);
            run.result("relu_backward", z, kEqual);
          },
          shift);
    }
  }
}

TEST_CASE("add, relu_backward: arrays that begin at different distances from a pack",
          "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const int64_t n : {5, 33, 70001}) {
    for (const int64_t first : {1, 2, 3, 4}) {
      INFO(n << " elements, one array begins " << first << " elements later");
      both.agree([&](Run& run) {
        const Tensor all = run.random({n + first}, 1), y = run.random({n}, 2);
        run.ops.add(run.stream, all.range(first, {n}), y);
        run.result("add", y, kEqual);
        run.ops.relu_backward(run.stream, y, y, all.range(first, {n}));
        run.result("relu_backward", all, kEqual);
      });
    }
  }
}

TEST_CASE(
    "to_sixteen_bits, from_sixteen_bits: the bits of the CPU, midpoints, subnormals and NaN "
    "included",
    "[cuda][ops][sixteen]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const int64_t n : kSizes) {
    for (const int64_t shift : {0, 1}) {
      INFO(n << " elements, shift " << shift);
      both.agree(
          [&](Run& run) {
            Values values = with_special(random_values({n}, 1));
            for (size_t i = 5; i < values.size(); ++i) {
              // Half-way between two of bf16, on either side of it, of any size.
              const uint32_t bits = uint32_t(i * 0x9e3779b9u) << 16 | uint32_t(0x7fff + i % 3);
              if (const auto x = std::bit_cast<float>(bits); std::isfinite(x)) values[i] = Real(x);
            }
            const Bf16Tensor half = run.put({n}, std::vector<Bf16>(size_t(n), Bf16(7)));
            const Tensor back = run.output({n});
            for (const Real factor : {Real(1), Real(1) / 3}) {
              run.ops.to_sixteen_bits(run.stream, factor, run.put({n}, values), half);
              run.result("to_sixteen_bits", half, kEqual);
              run.ops.from_sixteen_bits(run.stream, half, back);
              run.result("from_sixteen_bits", back, kEqual);
            }
          },
          shift);
    }
  }
}

TEST_CASE("normalize_images: bitwise for every byte", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const Shape& shape : {Shape{1, 1, 1, 1}, Shape{5, 7, 9, 1}, Shape{3, 31, 33, 3}}) {
    both.agree([&](Run& run) {
      std::vector<uint8_t> bytes(static_cast<size_t>(shape.elements()));
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i % 256);
      const ByteTensor x = run.put(shape, bytes);
      const Tensor y = run.output(shape);
      run.ops.normalize_images(run.stream, x, Real(0.1307), Real(0.3081), y);
      run.result("normalize_images", y, kEqual);
    });
  }
}

TEST_CASE("to_channels_first, to_channels_last: each element at its place", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const Shape& nhwc : {Shape{1, 1, 1, 1}, Shape{5, 7, 9, 3}, Shape{1, 7, 9, 33},
                            Shape{2, 1, 5, 257}, Shape{31, 4, 4, 20}}) {
    both.agree([&](Run& run) {
      const Tensor first = run.output({nhwc[0], nhwc[3], nhwc[1], nhwc[2]});
      const Tensor last = run.output(nhwc);
      run.ops.to_channels_first(run.stream, run.random(nhwc, 1), first);
      run.result("to_channels_first", first, kEqual);
      run.ops.to_channels_last(run.stream, first, last);
      run.result("to_channels_last", last, kEqual);
    });
  }
}

// --- Dropout -------------------------------------------------------------------------------------

TEST_CASE("dropout_mask: bit by bit that of the CPU", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  const int64_t far = int64_t{1} << 33;  // beyond 32 bits
  const StepState states[] = {{.step = 3, .first_position = 5, .position_stride = 2},
                              {.step = far, .first_position = far, .position_stride = 7}};
  for (const StepState& state : states) {
    for (const auto& [samples, features] :
         {std::pair{1, 1}, {5, 3}, {33, 31}, {31, 32}, {64, 257}}) {
      for (const Real p : {Real(0), Real(0.25), Real(0.5)}) {
        INFO(samples << " samples, " << features << " features, p " << p);
        both.agree([&, samples = samples, features = features](Run& run) {
          const Tensor mask = run.output({samples, features});
          const DropoutKey key{.seed = 9, .layer = 77, .first_feature = samples};
          run.ops.dropout_mask(run.stream, run.state(state), key, p, mask);
          run.result("mask", mask, kEqual);
        });
      }
    }
  }
}

TEST_CASE("apply_mask: element by element, or whole channels", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const auto& [samples, features] : {std::pair{1, 1}, {5, 3}, {5, 33}, {3, 20}, {2, 257}}) {
    for (const Shape& shape : {Shape{samples, features}, Shape{samples, 7, 9, features}}) {
      INFO(shape.text());
      both.agree([&, samples = samples, features = features](Run& run) {
        const Tensor y = run.output(shape);
        run.ops.apply_mask(run.stream, run.random(shape, 1), run.random({samples, features}, 2), y);
        run.result("y", y, kEqual);
      });
    }
  }
}

// --- Loss and metrics ----------------------------------------------------------------------------

const std::vector<std::pair<int64_t, int64_t>> kScoreSizes{
    {1, 1}, {1, 10}, {5, 3}, {33, 31}, {64, 10}, {31, 257}, {5, 1000}, {1000, 10}, {7, 12}};

/// Labels spread over the classes, or all of the last one.
std::vector<int32_t> labels_of(int64_t samples, int64_t classes, bool one_class) {
  std::vector<int32_t> labels(static_cast<size_t>(samples), static_cast<int32_t>(classes - 1));
  for (size_t n = 0; n < labels.size() && !one_class; ++n) {
    labels[n] = static_cast<int32_t>(n * 7 % static_cast<size_t>(classes));
  }
  return labels;
}

TEST_CASE("log_softmax, log_softmax_backward: close for small scores, finite for large ones",
          "[cuda][ops][row19]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const auto& [rows, classes] : kScoreSizes) {
    for (const Real size : {Real(6), Real(1e4)}) {
      INFO(rows << " rows, " << classes << " classes, scores up to " << size);
      both.agree([&, rows = rows, classes = classes](Run& run) {
        const Shape shape{rows, classes};
        const Values x = with_each(random_values(shape, 1), [=](Real v) { return size * v; });
        const Tensor y = run.output(shape), dx = run.output(shape);
        run.ops.log_softmax(run.stream, run.put(shape, x), y);
        run.result("y", y, kClose);
        run.ops.log_softmax_backward(run.stream, y, run.random(shape, 2), dx);
        run.result("dx", dx, kClose);
        for (const Tensor& tensor : {y, dx}) {
          const Values values = tensor.to_host();
          CHECK(std::ranges::all_of(values, [](Real v) { return std::isfinite(v); }));
        }
      });
    }
  }
}

TEST_CASE("log_softmax, log_softmax_backward: a NaN reaches its whole row, and no other",
          "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const int64_t classes : {10, 257}) {
    both.agree([&](Run& run) {
      const Shape shape{4, classes};
      Values x = random_values(shape, 1);
      x[0] = x[2 * classes + classes / 2] = x[4 * classes - 1] = kNaN;
      const Tensor y = run.output(shape), dx = run.output(shape);
      run.ops.log_softmax(run.stream, run.put(shape, x), y);
      run.result("y", y, kClose);
      run.ops.log_softmax_backward(run.stream, y, run.random(shape, 2), dx);
      run.result("dx", dx, kClose);
      const Values found = y.to_host();
      for (int64_t i = 0; i < shape.elements(); ++i) {
        REQUIRE(std::isnan(found[i]) == (i / classes != 1));
      }
    });
  }
}

TEST_CASE("nll_loss, nll_loss_backward: the loss adds, every sample with its weight",
          "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const auto& [samples, classes] : kScoreSizes) {
    for (const bool one_class : {false, true}) {
      INFO(samples << " samples, " << classes << " classes, one class " << one_class);
      both.agree([&, samples = samples, classes = classes](Run& run) {
        const Shape shape{samples, classes};
        const LabelTensor labels = run.labels(labels_of(samples, classes, one_class));
        const StepStateTensor state = run.state({.loss_weight = Real(1) / Real(samples)});
        const Tensor loss = run.filled({1}, Real(0.5)), dx = run.output(shape);
        run.ops.nll_loss(run.stream, state, run.random(shape, 1), labels, loss);
        run.result("loss", loss, kRounding);
        run.ops.nll_loss_backward(run.stream, state, labels, dx);
        run.result("dx", dx, kEqual);
      });
    }
  }
}

TEST_CASE("count_correct: the count adds, the first of equal scores is the answer", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const auto& [samples, classes] : kScoreSizes) {
    for (const bool one_class : {false, true}) {
      INFO(samples << " samples, " << classes << " classes, one class " << one_class);
      both.agree([&, samples = samples, classes = classes](Run& run) {
        const Values scores = on_grid({samples, classes}, Real(0.5), 1);  // many are equal
        const CountTensor count = run.put<int64_t>({1}, {int64_t{1} << 40});
        run.ops.count_correct(run.stream, run.put({samples, classes}, scores),
                              run.labels(labels_of(samples, classes, one_class)), count);
        run.result("count", count, kEqual);
      });
    }
  }
}

// --- Optimizer -----------------------------------------------------------------------------------

TEST_CASE("check_finite: the first step with a NaN or an infinity is kept, wherever it stands",
          "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  const auto check = [&](int64_t n, int64_t at, Real bad) {
    INFO(bad << " at " << at << " of " << n);
    both.agree([&](Run& run) {
      Values x = with_each(random_values({n}, 1), [](Real v) { return v * Real(3e38); });
      const HealthTensor health = run.health(-1);
      run.ops.check_finite(run.stream, run.state({.step = 4}), run.put({n}, x), health);
      run.result(health);
      x[at] = bad;
      for (const int64_t step : {5, 6}) {
        run.ops.check_finite(run.stream, run.state({.step = step}), run.put({n}, x), health);
        run.result(health);
      }
    });
  };
  for (const int64_t n : {1, 33, 1000, 70001}) {
    for (const int64_t at : {int64_t{0}, n / 2, n - 1}) {
      for (const Real bad : {kNaN, kInfinity, -kInfinity}) check(n, at, bad);
    }
  }
  // Bad everywhere: whichever thread reports, there is one step to report.
  both.agree([&](Run& run) {
    const HealthTensor health = run.health(-1);
    run.ops.check_finite(run.stream, run.state({.step = 8}), run.filled({70001}, kNaN), health);
    run.result(health);
  });
}

TEST_CASE("scale_loss, unscale, update_scale: there and back, and a step that is skipped",
          "[cuda][ops][sixteen]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const int64_t n : {1, 33, 70001}) {
    for (const int64_t shift : {0, 1}) {
      INFO(n << " elements, shift " << shift);
      both.agree(
          [&](Run& run) {
            const HealthTensor health = run.put<Health>({}, {Health{.scale = 1024}});
            const Tensor x = run.random({n}, 1);
            run.ops.scale_loss(run.stream, health, x);
            run.result("scaled", x, kEqual);
            for (int64_t step = 0; step < 5; ++step) {
              const StepStateTensor state = run.state({.step = step});
              Values gradient = random_values({n}, 2);
              if (step == 2) gradient[n / 2] = kInfinity;
              const Tensor dx = run.put({n}, gradient);
              run.ops.unscale(run.stream, state, health, dx);
              if (step != 2) run.result("unscaled", dx, kEqual);
              run.result(health);
              run.ops.update_scale(run.stream, /*growth_interval=*/2, health);
              run.result(health);
            }
          },
          shift);
    }
  }
}

TEST_CASE("poison: the first number, once training has failed", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const int64_t failed_step : {int64_t{-1}, int64_t{0}, int64_t{3}}) {
    const auto poisoned = [&](Run& run) {
      const Tensor x = run.put<Real>({2}, {5, 6});
      run.ops.poison(run.stream, run.health(failed_step), x);
      const std::vector<Real> found = x.to_host();
      CHECK(std::isnan(found[0]) == (failed_step >= 0));
      if (failed_step < 0) CHECK(found[0] == 5);
      CHECK(found[1] == 6);
      run.result("the next number", x.range(1, {1}), kEqual);
    };
    both.agree(poisoned);
  }
}

TEST_CASE("sum_squares, clip_to_norm: what is longer becomes shorter", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const int64_t n : kSizes) {
    for (const Real most : {Real(0.1), Real(1e6)}) {
      INFO(n << " elements, at most " << most);
      both.agree(
          [&](Run& run) {
            const Tensor x = run.random({n}, 1);
            const Tensor sums = run.output({1 + (n + Kernels::kSumPart - 1) / Kernels::kSumPart});
            run.ops.sum_squares(run.stream, x, sums);
            run.ops.clip_to_norm(run.stream, most, sums, x);
            run.result("x", x, 1e-5);  // sums in another order
            run.result("sums", sums, 1e-5);
          },
          /*shift=*/n % 2);
    }
  }
}

TEST_CASE("sgd_update: momentum and weight decay over three steps", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const int64_t n : kSizes) {
    for (const Real momentum : {Real(0), Real(0.9)}) {
      for (const Real decay : {Real(0), Real(0.01)}) {
        INFO(n << " elements, momentum " << momentum << ", decay " << decay);
        both.agree(
            [&](Run& run) {
              const Tensor weight = run.random({n}, 1);
              const Tensor velocity = momentum > 0 ? run.random({n}, 2) : Tensor();
              for (const int64_t step : {0, 1, 2}) {
                const Real rate = Real(0.1) / Real(step + 1);
                run.ops.sgd_update(
                    run.stream, run.state({.step = step, .learning_rate = rate}), run.health(-1),
                    run.owners(n), {.momentum = momentum, .weight_decay = decay},
                    run.random({n}, static_cast<uint32_t>(3 + step)), velocity, weight);
              }
              run.result("weight", weight, kRounding);
              if (momentum > 0) run.result("velocity", velocity, kRounding);
            },
            /*shift=*/n % 2);
      }
    }
  }
}

TEST_CASE("sgd_update: nothing moves once training has failed", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  both.agree([&](Run& run) {
    const Values start = random_values({257}, 1);
    const Tensor weight = run.put({257}, start), velocity = run.put({257}, start);
    for (const SgdRule& rule : {SgdRule{}, SgdRule{.momentum = Real(0.9)}}) {
      run.ops.sgd_update(run.stream, run.state({.step = 1, .learning_rate = 1}), run.health(0),
                         run.owners(257), rule, run.filled({257}, kNaN),
                         rule.momentum > 0 ? velocity : Tensor(), weight);
    }
    CHECK(weight.to_host() == start);
    CHECK(velocity.to_host() == start);
    run.result("weight", weight, kEqual);
    run.result("velocity", velocity, kEqual);
  });
}

TEST_CASE("adam_count, adam_update: both kinds of weight decay over three steps", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const int64_t n : kSizes) {
    for (const bool decoupled : {false, true}) {
      INFO(n << " elements, decoupled " << decoupled);
      both.agree(
          [&](Run& run) {
            const Tensor weight = run.random({n}, 1);
            const Tensor exp_avg = run.filled({n}, 0), exp_avg_sq = run.filled({n}, 0);
            const CountTensor steps = run.put<int64_t>({3}, {0, 7, 100});
            const Tensor factors = run.filled({3, 2}, 0);
            for (const int64_t step : {0, 1, 2}) {
              const StepStateTensor state =
                  run.state({.step = step, .learning_rate = Real(0.1) / Real(step + 1)});
              const AdamRule rule{.eps = 1e-3, .weight_decay = 0.1, .decoupled = decoupled};
              const Owners owners = run.owners(n);
              run.ops.adam_count(run.stream, state, run.health(-1), owners.marks, rule, steps,
                                 factors);
              run.ops.adam_update(run.stream, state, run.health(-1), owners, rule, factors,
                                  run.random({n}, static_cast<uint32_t>(3 + step)), exp_avg,
                                  exp_avg_sq, weight);
            }
            run.result("steps", steps, kEqual);
            run.result("factors", factors, kRounding);
            run.result("weight", weight, kRounding);
            run.result("exp_avg", exp_avg, kRounding);
            run.result("exp_avg_sq", exp_avg_sq, kRounding);
          },
          /*shift=*/n % 2);
    }
  }
}

TEST_CASE("adam_count, adam_update: nothing moves once training has failed", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  both.agree([&](Run& run) {
    const Values start = random_values({257}, 1);
    const Tensor weight = run.put({257}, start), exp_avg = run.put({257}, start),
                 exp_avg_sq = run.filled({257}, 1);
    const StepStateTensor state = run.state({.step = 1, .learning_rate = 1});
    const CountTensor steps = run.put<int64_t>({3}, {1, 2, 3});
    const Tensor factors = run.filled({3, 2}, 1);
    const Owners owners = run.owners(257);
    run.ops.adam_count(run.stream, state, run.health(0), owners.marks, {}, steps, factors);
    run.ops.adam_update(run.stream, state, run.health(0), owners, {}, factors,
                        run.filled({257}, kNaN), exp_avg, exp_avg_sq, weight);
    CHECK(steps.to_host() == std::vector<int64_t>{1, 2, 3});
    CHECK(weight.to_host() == start);
    run.result("weight", weight, kEqual);
    run.result("exp_avg", exp_avg, kEqual);
    run.result("exp_avg_sq", exp_avg_sq, kEqual);
  });
}

}  // namespace
}  // namespace lockstep
