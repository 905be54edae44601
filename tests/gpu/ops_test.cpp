// Every operation of kernels/kernels.h on a GPU against the reference engine on the CPU: relative
// L2 1e-4 at most, equal where there is nothing to round. The name of a case begins with the
// operations that it tests; tests/tools/test_gpu_ops.py finds the ones that no case names.
//
// `[&, rows = rows]`: clang++ captures the names of a pair's halves by themselves from 16 on.

#include <array>

#include "tests/gpu/gpu_test_support.h"

namespace lockstep {
namespace {

using testing::Both;
using testing::random_values;
using testing::Run;
using Values = std::vector<Real>;

constexpr double kEqual = 0;
constexpr double kRounding = 1e-6;  // a few operations, which a compiler may fuse
constexpr double kSums = 1e-5;      // sums in another order
constexpr double kClose = 1e-4;     // sums of both signs, other libraries
constexpr Real kNaN = std::numeric_limits<Real>::quiet_NaN();
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

// Around the sizes of a warp and of a block, none, and more than one pass of a small grid.
const std::vector<int64_t> kSizes{0, 1, 3, 31, 33, 257, 1000, 70001};
const std::vector<int64_t> kChannels{1, 3, 31, 33, 257};

/// `values` with NaN, infinities, zeros of both signs at the front, as far as they go.
Values with_special(Values values) {
  const Values special{kNaN, kInfinity, -kInfinity, 0, -Real(0)};
  std::copy_n(special.begin(), std::min(special.size(), values.size()), values.begin());
  return values;
}

Values with_each(Values values, const std::function<Real(Real)>& f) {
  for (Real& value : values) value = f(value);
  return values;
}

/// Multiples of `step` in [-1, 1]: sums and products of a few of them are exact.
Values on_grid(const Shape& shape, Real step, uint32_t seed) {
  return with_each(random_values(shape, seed), [=](Real v) { return std::round(v / step) * step; });
}

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

TEST_CASE("add, scale, relu, relu_backward, add_relu: one operation per element, NaN stays NaN",
          "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const int64_t n : kSizes) {
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
            run.ops.add_relu(run.stream, x, run.random({n}, 4), z);
            run.result("add_relu", z, kEqual);
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

// --- Collectives in one process ----------------------------------------------------------------

/// Makes `ranks` ranks, which are to become their sum, as is one tensor beside them.
template <class T>
RankSum make_rank_sum(Run& run, ElementType type, int64_t count, int ranks,
                      std::vector<BasicTensor<T>>& targets) {
  RankSum sum{.type = type, .count = count};
  const auto put = [&](int seed) {
    std::vector<T> values;
    for (const Real v : random_values({count}, uint32_t(seed))) {
      values.push_back(std::is_integral_v<T> ? T(v * Real(1 << 20)) : T(v) / T(seed + 2));
    }
    targets.push_back(run.put({count}, values));
    return targets.back().data();
  };
  for (int rank = 0; rank < ranks; ++rank) sum.source[rank] = put(rank + 1);
  sum.sources = ranks;
  if (ranks < kMostRanks) put(99);
  for (const auto& target : targets) sum.target[sum.targets++] = target.data();
  return sum;
}

TEST_CASE("sum_ranks: in rank order and bitwise, into the ranks' own memory and beside it",
          "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  const auto agree = [&](int64_t count, int ranks, int64_t shift) {
    INFO(count << " elements, " << ranks << " ranks, shift " << shift);
    const auto check = [&](Run& run, ElementType type, auto zero, double factor) {
      std::vector<BasicTensor<decltype(zero)>> targets;
      RankSum sum = make_rank_sum(run, type, count, ranks, targets);
      sum.factor = factor;
      run.ops.sum_ranks(run.stream, sum);
      for (const auto& target : targets) run.result("sum_ranks", target, kEqual);
    };
    const auto work = [&](Run& run) {
      check(run, ElementType::f32, float{}, 1.0 / ranks);
      check(run, ElementType::f64, double{}, 1.0 / ranks);
      check(run, ElementType::i64, int64_t{}, 1);
    };
    both.agree(work, shift);
  };
  for (const int64_t count : kSizes) agree(count, 3, count % 2);
  for (const int ranks : {1, 2, 7, kMostRanks}) agree(257, ranks, 1);
}

// --- Convolution and matrix product ------------------------------------------------------------

Window2d window(int64_t batch, int64_t height, int64_t width, int64_t in, int64_t out,
                int64_t kernel, int64_t stride, int64_t padding) {
  return make_window("test", {batch, height, width, in}, in, out, kernel, stride, padding);
}

std::string text(const Window2d& g) {
  return fmt::format("{} -> {}, kernel {}, stride {}, padding {}", g.input().text(),
                     g.output().text(), g.kernel, g.stride, g.padding);
}

std::vector<Window2d> conv_windows() {
  return {window(1, 1, 1, 1, 1, 1, 1, 0),
          window(1, 7, 9, 1, 10, 5, 1, 0),
          window(0, 7, 9, 3, 31, 3, 1, 1),
          window(5, 7, 9, 3, 31, 3, 1, 1),
          window(5, 7, 9, 31, 33, 3, 2, 1),
          window(1, 7, 9, 33, 3, 2, 3, 0),
          window(5, 7, 9, 257, 1, 1, 1, 0),
          window(1, 7, 9, 3, 257, 1, 2, 0),
          window(5, 7, 9, 10, 20, 5, 1, 2),
          window(1, 7, 9, 31, 33, 5, 3, 2),
          window(5, 4, 4, 2, 16, 3, 1, 2),
          window(3, 8, 6, 4, 7, 2, 2, 1),
          window(2, 28, 28, 1, 10, 5, 1, 0),
          window(2, 12, 12, 10, 20, 5, 1, 0),  // the seed network's two, and some of ResNet-18's
          window(1, 28, 28, 1, 64, 3, 1, 1),
          window(1, 14, 14, 64, 64, 3, 1, 1),
          window(1, 14, 14, 64, 128, 3, 2, 1),
          window(1, 14, 14, 64, 128, 1, 2, 0)};
}

TEST_CASE("conv2d, conv2d_backward_input, conv2d_backward_parameters: gradients of parameters add",
          "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  std::vector<Window2d> windows = conv_windows();
  windows.push_back(windows[2]);  // plans and workspaces of one shape must not leak into another
  for (const Window2d& g : windows) {
    INFO(text(g));
    both.agree([&](Run& run) {
      const Tensor x = run.random(g.input(), 1), weight = run.random(g.weight(), 2);
      const Tensor dy = run.random(g.output(), 4);
      const Tensor y = run.output(g.output()), dx = run.output(g.input());
      run.ops.conv2d(run.stream, g, x, weight, run.random({g.out_channels}, 3), y);
      run.result("y", y, kClose);
      run.ops.conv2d_backward_input(run.stream, g, dy, weight, dx);
      run.result("dx", dx, kClose);
      const Tensor dweight = run.random(g.weight(), 5), dbias = run.random({g.out_channels}, 6);
      run.ops.conv2d_backward_parameters(run.stream, g, x, dy, dweight, dbias);
      run.result("dweight", dweight, kClose);
      run.result("dbias", dbias, kClose);
    });
  }
}

TEST_CASE("matmul: all transposes, with and without adding", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  const std::vector<std::array<int64_t, 3>> sizes{
      {1, 1, 1},     {3, 5, 7},      {33, 1, 17}, {1, 10, 50}, {31, 33, 257}, {257, 3, 1},
      {64, 50, 320}, {1000, 10, 33}, {0, 10, 50}, {10, 0, 50}, {10, 50, 0}};
  for (const auto& [m, n, k] : sizes) {
    for (int variant = 0; variant < 8; ++variant) {
      const MatMul s{.m = m,
                     .n = n,
                     .k = k,
                     .transpose_a = (variant & 1) != 0,
                     .transpose_b = (variant & 2) != 0,
                     .accumulate = (variant & 4) != 0};
      INFO("m " << s.m << ", n " << s.n << ", k " << s.k << ", variant " << variant);
      both.agree([&](Run& run) {
        const Shape shape{s.m, s.n};
        const Tensor c = s.accumulate ? run.random(shape, 3) : run.output(shape);
        run.ops.matmul(run.stream, s, run.random({s.m, s.k}, 1), run.random({s.k, s.n}, 2), c);
        run.result("c", c, kClose);
      });
    }
  }
}

TEST_CASE("add_bias, add_column_sums: a bias for every row, and its gradient adds", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  const auto check = [&](int64_t rows, int64_t features) {
    INFO(rows << " rows, " << features << " features");
    both.agree([&](Run& run) {
      const Shape shape{rows, features};
      const Tensor bias = run.random({features}, 2);
      for (const bool relu : {false, true}) {
        const Tensor y = run.put(shape, with_special(random_values(shape, 1)));
        run.ops.add_bias(run.stream, bias, relu, y);
        run.result(relu ? "add_bias and ReLU" : "add_bias", y, kEqual);
      }
      // Numbers around 10: a sum in few digits would show.
      const Values dy = with_each(random_values(shape, 3), [](Real v) { return v + 10; });
      run.ops.add_column_sums(run.stream, run.put(shape, dy), bias);
      run.result("add_column_sums", bias, kSums);
    });
  };
  for (const int64_t features : kChannels) {
    for (const int64_t rows : {1, 5, 31, 33, 1000}) check(rows, features);
  }
  check(70001, 3);
}

// --- Pooling -------------------------------------------------------------------------------------

TEST_CASE("max_pool2d, max_pool2d_backward: windows that tile, overlap, or leave pixels out",
          "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const int64_t kernel : {1, 2, 3, 5}) {
    for (const int64_t stride : {1, 2, 3}) {
      for (const auto& [batch, channels] : {std::pair{1, 1}, {5, 3}, {1, 33}, {2, 257}}) {
        const Window2d g = window(batch, 7, 9, channels, channels, kernel, stride, 0);
        for (const bool relu : {false, true}) {
          INFO(text(g) << ", relu " << relu);
          both.agree([&](Run& run) {
            const Tensor y = run.output(g.output()), dx = run.output(g.input());
            const IndexTensor where = run.put<int32_t>(g.output(), {});
            run.ops.max_pool2d(run.stream, g, relu, run.random(g.input(), 1), y, where);
            run.result("y", y, kEqual);
            run.result("where", where, kEqual);
            run.ops.max_pool2d_backward(run.stream, g, run.random(g.output(), 2), where, dx);
            run.result("dx", dx, kRounding);
          });
        }
      }
    }
  }
}

TEST_CASE("max_pool2d, max_pool2d_backward: the first of equal values wins, NaN beats all",
          "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const Window2d& g : {window(2, 8, 12, 3, 3, 2, 2, 0), window(2, 8, 12, 3, 3, 3, 2, 0)}) {
    both.agree([&](Run& run) {
      Values x = on_grid(g.input(), Real(0.5), 1);  // five values: many are equal
      for (size_t i = 0; i < x.size(); i += 11) x[i] = kNaN;
      const Tensor y = run.output(g.output()), dx = run.output(g.input());
      const IndexTensor where = run.put<int32_t>(g.output(), {});
      run.ops.max_pool2d(run.stream, g, /*relu=*/true, run.put(g.input(), x), y, where);
      run.result("y", y, kEqual);
      run.result("where", where, kEqual);
      run.ops.max_pool2d_backward(run.stream, g, run.random(g.output(), 2), where, dx);
      run.result("dx", dx, kRounding);
    });
  }
}

TEST_CASE("adaptive_avg_pool2d, adaptive_avg_pool2d_backward: ranges that overlap, or are one",
          "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  const std::vector<std::array<int64_t, 6>> sizes{{2, 5, 3, 2, 2, 3},   {5, 7, 9, 3, 2, 31},
                                                  {5, 4, 4, 1, 1, 257}, {1, 5, 6, 5, 6, 2},
                                                  {2, 2, 3, 3, 7, 1},   {1, 1, 1, 1, 1, 33}};
  for (const auto& [batch, height, width, out_height, out_width, channels] : sizes) {
    const Shape in{batch, height, width, channels}, out{batch, out_height, out_width, channels};
    INFO(in.text() << " -> " << out.text());
    both.agree([&](Run& run) {
      const Tensor y = run.output(out), dx = run.output(in);
      run.ops.adaptive_avg_pool2d(run.stream, run.random(in, 1), y);
      run.result("y", y, kRounding);
      run.ops.adaptive_avg_pool2d_backward(run.stream, run.random(out, 2), dx);
      run.result("dx", dx, kRounding);
    });
  }
}

// --- Batch normalisation -------------------------------------------------------------------------

constexpr Real kEps = Real(1e-5);

/// Rows and channels of the reductions: one, around a warp, a thousand, and very many.
std::vector<Shape> norm_shapes() {
  std::vector<Shape> shapes{{70001, 3}, {0, 33}};
  for (const int64_t channels : kChannels) {
    for (const int64_t rows : {1, 31, 33, 1000}) shapes.push_back({rows, channels});
  }
  return shapes;
}

TEST_CASE("batch_norm_statistics: digits survive a mean that is large beside the spread",
          "[cuda][ops][row100]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const Shape& shape : norm_shapes()) {
    for (const Real mean : {Real(0), Real(1e4)}) {
      INFO(shape.text() << ", mean " << mean);
      both.agree([&](Run& run) {
        const Values x = with_each(random_values(shape, 1), [=](Real v) { return mean + v; });
        const Tensor statistics = run.output({2 * shape[1] + 1});
        run.ops.batch_norm_statistics(run.stream, run.put(shape, x), statistics);
        run.result("mean", statistics.range(0, {shape[1]}), mean == 0 ? kClose : kRounding);
        run.result("M2", statistics.range(shape[1], {shape[1]}), kSums);
        run.result("rows", statistics.range(2 * shape[1], {1}), kEqual);
      });
    }
  }
}

TEST_CASE("batch_norm_prepare, batch_norm_prepare_eval: running statistics move by their share",
          "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  const auto positive = [](Real v) { return v + 2; };
  for (const int64_t channels : kChannels) {
    for (const Real momentum : {Real(0), Real(0.1)}) {
      INFO(channels << " channels, momentum " << momentum);
      both.agree([&](Run& run) {
        Values values = with_each(random_values({2 * channels + 1}, 1), positive);
        values.back() = 33;
        const Tensor mean = run.random({channels}, 2), norm = run.output({2 * channels + 1});
        const Tensor var = run.put({channels}, with_each(random_values({channels}, 3), positive));
        run.ops.batch_norm_prepare(run.stream, run.put({2 * channels + 1}, values), kEps, momentum,
                                   mean, var, norm);
        run.result("norm", norm, kRounding);
        run.result("running mean", mean, momentum > 0 ? kRounding : kEqual);
        run.result("running variance", var, momentum > 0 ? kRounding : kEqual);
        const Tensor eval = norm.range(0, {2 * channels});
        run.ops.batch_norm_prepare_eval(run.stream, mean, var, kEps, eval);
        run.result("norm of the running statistics", eval, kRounding);
      });
    }
  }
}

TEST_CASE("batch_norm_merge: parts of any size, in their order", "[cuda][ops][row98][row100]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const int64_t channels : kChannels) {
    for (const Real mean : {Real(0), Real(1e4)}) {
      both.agree([&](Run& run) {
        Values gathered = random_values({5, 2 * channels + 1}, 1);
        for (int64_t part = 0; part < 5; ++part) {
          Real* statistics = gathered.data() + part * (2 * channels + 1);
          const int64_t rows = part % 2 == 0 ? 0 : 100 * part;  // means, M2s, rows
          for (int64_t c = 0; c < channels; ++c) {
            statistics[c] = rows == 0 ? 0 : mean + statistics[c];
            statistics[channels + c] = std::abs(statistics[channels + c]) * Real(rows);
          }
          statistics[2 * channels] = Real(rows);
        }
        const Tensor merged = run.output({2 * channels + 1});
        run.ops.batch_norm_merge(run.stream, run.put({5, 2 * channels + 1}, gathered), merged);
        run.result("merged", merged, kRounding);
      });
    }
  }
}

/// Inputs of batch normalisation for which (x - mean) invstd weight + bias is exact and never 0, so
/// that a fused ReLU cuts the same elements whatever a compiler fuses.
struct NormInputs {
  NormInputs(Run& run, const Shape& shape)
      : x(run.put(shape, on_grid(shape, Real(0.25), 1))),
        dy(run.random(shape, 2)),
        skip(run.put(shape, on_grid(shape, Real(0.25), 3))),
        norm(run.put({2 * shape[1] + 1}, off_grid_norm(shape))),
        weight(run.put({shape[1]}, with_each(random_values({shape[1]}, 5),
                                             [](Real v) { return v < 0 ? -1 : Real(0.5); }))),
        bias(run.put({shape[1]}, on_grid({shape[1]}, Real(0.25), 6))) {}

  /// Means between the multiples of 1/4, scales 1 or 2, and 1 / rows.
  static Values off_grid_norm(const Shape& shape) {
    const int64_t channels = shape[1];
    Values norm = on_grid({2, channels}, Real(0.25), 4);
    for (int64_t c = 0; c < channels; ++c) {
      norm[c] += Real(0.0625);
      norm[channels + c] = norm[channels + c] < 0 ? 1 : 2;
    }
    norm.push_back(shape[0] > 0 ? 1 / Real(shape[0]) : 0);
    return norm;
  }
  Tensor x, dy, skip, norm, weight, bias;
};

TEST_CASE("batch_norm: with and without a residual and a ReLU", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const Shape& shape : norm_shapes()) {
    INFO(shape.text());
    both.agree([&](Run& run) {
      const NormInputs in(run, shape);
      for (const Tensor& skip : {Tensor(), in.skip}) {
        for (const bool relu : {false, true}) {
          const Tensor y = run.output(shape);
          run.ops.batch_norm(run.stream, in.x, in.norm, in.weight, in.bias, skip, relu, y);
          run.result(fmt::format("skip {}, relu {}", skip.defined(), relu), y, kEqual);
        }
      }
    });
  }
}

TEST_CASE(
    "batch_norm_backward_sums, batch_norm_backward_input, batch_norm_backward_parameters: "
    "the ReLU cuts gradients, those of parameters add",
    "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const Shape& shape : norm_shapes()) {
    for (const bool relu : {false, true}) {
      INFO(shape.text() << ", relu " << relu);
      both.agree([&](Run& run) {
        const NormInputs in(run, shape);
        const int64_t channels = shape[1];
        const Tensor sums = run.output({2, channels}), dx = run.output(shape);
        run.ops.batch_norm_backward_sums(run.stream, in.x, in.dy, in.norm, in.weight, in.bias, relu,
                                         sums);
        run.result("sum of dy", sums.rows(0, 1), kClose);
        run.result("sum of dy (x - mean)", sums.rows(1, 1), kClose);
        run.ops.batch_norm_backward_input(run.stream, in.x, in.dy, in.norm, in.weight, in.bias,
                                          relu, sums, dx);
        run.result("dx", dx, kClose);
        const Tensor dweight = run.random({channels}, 7), dbias = run.random({channels}, 8);
        run.ops.batch_norm_backward_parameters(run.stream, in.norm, sums, dweight, dbias);
        run.result("dweight", dweight, kClose);
        run.result("dbias", dbias, kClose);
      });
    }
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
    for (const auto& [samples, features] : {std::pair{1, 1}, {5, 3}, {33, 31}, {64, 257}}) {
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
  for (const auto& [samples, features] : {std::pair{1, 1}, {5, 3}, {5, 33}, {2, 257}}) {
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
    {1, 1}, {1, 10}, {5, 3}, {33, 31}, {64, 10}, {31, 257}, {5, 1000}, {1000, 10}};

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

TEST_CASE("clip_norm: the norm of everything, and what is longer becomes shorter", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const int64_t n : kSizes) {
    for (const Real most : {Real(0.1), Real(1e6)}) {
      INFO(n << " elements, at most " << most);
      both.agree(
          [&](Run& run) {
            const Tensor x = run.random({n}, 1);
            const Tensor norm = run.output({1 + (n + Kernels::kNormPart - 1) / Kernels::kNormPart});
            run.ops.clip_norm(run.stream, most, x, norm);
            run.result("x", x, 1e-5);  // sums in another order
            run.result("norm", norm, 1e-5);
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
                run.ops.sgd_update(run.stream, run.state({.step = step, .learning_rate = rate}),
                                   run.health(-1), {.momentum = momentum, .weight_decay = decay},
                                   run.random({n}, static_cast<uint32_t>(3 + step)), velocity,
                                   weight);
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
                         rule, run.filled({257}, kNaN), rule.momentum > 0 ? velocity : Tensor(),
                         weight);
    }
    CHECK(weight.to_host() == start);
    CHECK(velocity.to_host() == start);
    run.result("weight", weight, kEqual);
    run.result("velocity", velocity, kEqual);
  });
}

}  // namespace
}  // namespace lockstep
