// Operations of kernels/kernels.h on a GPU, as in ops_test.cpp: convolution, matrix product,
// pooling and batch normalisation.

#include <array>

#include "tests/gpu/gpu_test_support.h"
#include "tests/gpu/ops_test_support.h"

namespace lockstep {
namespace {

using namespace testing::ops;
using testing::Both;
using testing::random_values;
using testing::Run;
using Values = std::vector<Real>;

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
          window(3, 7, 7, 64, 48, 3, 1, 1),  // many channels, of a small image, and with a stride
          window(2, 7, 7, 33, 40, 3, 2, 1),
          window(1, 14, 14, 64, 128, 1, 2, 0)};
}

TEST_CASE("conv2d, conv2d_backward_input, conv2d_backward_parameters: gradients of parameters add",
          "[cuda][ops][convolution]") {
  LOCKSTEP_NEEDS_GPU();
  const bool channels_first = GENERATE(false, true);
  const Both both{.options = {.nchw = channels_first}};
  std::vector<Window2d> windows = conv_windows();
  windows.push_back(
      windows[2]);  // algorithms and workspaces of one shape must not leak into another
  for (const Window2d& g : windows) {
    INFO(text(g) << (channels_first ? ", NCHW" : ""));
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

TEST_CASE("conv2d: channels first, the last pixel of a large image", "[cuda][ops][convolution]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both{.options = {.nchw = true}};
  // Of the large one there are more tiles than a grid has blocks along y.
  const int64_t pixels = testing::full_campaign() ? 65'535 * 32 + 33 : 97;
  const Window2d g = make_window("conv", {1, 1, pixels, 2}, 2, 2, 1, 1, 0);
  const Tensor x = Tensor::empty(both.gpu, g.input()), y = Tensor::empty(both.gpu, g.output());
  const Tensor weight = Tensor::from_host(both.gpu, g.weight(), {1, 2, 3, 4});
  const Tensor bias = Tensor::from_host(both.gpu, {2}, {0, 1});
  Kernels& ops = both.gpu.kernels();
  ops.fill(both.gpu, 1, x);
  x.range(g.input().elements() - 2, {2}).copy_from_host({2, 2});  // the last pixel
  ops.conv2d(both.gpu, g, x, weight, bias, y);
  std::vector<Real> expected(static_cast<size_t>(g.output().elements()), 3);
  for (size_t i = 1; i < expected.size(); i += 2) expected[i] = 8;
  expected[expected.size() - 2] = 6;
  expected.back() = 15;
  CHECK((y.to_host() == expected));
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
    both.agree(
        [&](Run& run) {
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
        },
        /*shift=*/rows % 2);
  };
  for (const int64_t features : kChannels) {
    for (const int64_t rows : {1, 5, 31, 33, 1000}) check(rows, features);
  }
  check(70001, 3);
  check(70000, 20);
}

TEST_CASE("add_bias: either the bias begins beside a pack, or the rows do", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  both.agree([](Run& run) {
    const Tensor biases = run.random({23}, 2), rows = run.random({103}, 1);
    for (const int64_t first : {1, 2, 3}) {
      run.ops.add_bias(run.stream, biases.range(first, {20}), false, rows.range(0, {5, 20}));
      run.ops.add_bias(run.stream, biases.range(0, {20}), false, rows.range(first, {5, 20}));
    }
    run.result("rows", rows, kEqual);
  });
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
      both.agree(
          [&](Run& run) {
            const Values x = with_each(random_values(shape, 1), [=](Real v) { return mean + v; });
            const Tensor statistics = run.output({2 * shape[1] + 1});
            run.ops.batch_norm_statistics(run.stream, run.put(shape, x), statistics);
            run.result("mean", statistics.range(0, {shape[1]}), mean == 0 ? kClose : kRounding);
            run.result("M2", statistics.range(shape[1], {shape[1]}), kSums);
            run.result("rows", statistics.range(2 * shape[1], {1}), kEqual);
          },
          /*shift=*/shape[0] % 2);
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

TEST_CASE("batch_norm_measure: what the statistics of all rows give", "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const Shape& shape : norm_shapes()) {
    INFO(shape.text());
    const Shape channels{shape[1]};
    both.agree(
        [&](Run& run) {
          const Tensor mean = run.random(channels, 2), var = run.filled(channels, 1);
          const Tensor norm = run.output({2 * shape[1] + 1});
          const Values x = with_each(random_values(shape, 1), [](Real v) { return 10 + v; });
          run.ops.batch_norm_measure(run.stream, run.put(shape, x), kEps, Real(0.1), mean, var,
                                     norm);
          run.result("norm", norm, kSums);
          run.result("running mean", mean, kClose);
          run.result("running variance", var, kSums);
        },
        /*shift=*/shape[0] % 2);
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
    both.agree(
        [&](Run& run) {
          const NormInputs in(run, shape);
          for (const Tensor& skip : {Tensor(), in.skip}) {
            for (const bool relu : {false, true}) {
              const Tensor y = run.output(shape);
              run.ops.batch_norm(run.stream, in.x, in.norm, in.weight, in.bias, skip, relu, y);
              run.result(fmt::format("skip {}, relu {}", skip.defined(), relu), y, kEqual);
            }
          }
        },
        /*shift=*/shape[0] % 2);
  }
}

TEST_CASE(
    "batch_norm_backward_sums, batch_norm_backward_input: "
    "the ReLU cuts gradients, those of parameters add",
    "[cuda][ops]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const Shape& shape : norm_shapes()) {
    for (const bool relu : {false, true}) {
      INFO(shape.text() << ", relu " << relu);
      both.agree(
          [&](Run& run) {
            const NormInputs in(run, shape);
            const int64_t channels = shape[1];
            const Tensor sums = run.output({2, channels}), dx = run.output(shape);
            const Tensor dweight = run.random({channels}, 7), dbias = run.random({channels}, 8);
            run.ops.batch_norm_backward_sums(run.stream, in.x, in.dy, in.norm, in.weight, in.bias,
                                             relu, sums, dweight, dbias);
            run.result("sum of dy", sums.rows(0, 1), kClose);
            run.result("sum of dy (x - mean)", sums.rows(1, 1), kClose);
            run.ops.batch_norm_backward_input(run.stream, in.x, in.dy, in.norm, in.weight, in.bias,
                                              relu, sums, dx);
            run.result("dx", dx, kClose);
            run.result("dweight", dweight, kClose);
            run.result("dbias", dbias, kClose);
          },
          /*shift=*/shape[0] % 2);
    }
  }
}

}  // namespace
}  // namespace lockstep
