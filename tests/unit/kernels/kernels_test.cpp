// Every operation of kernels/kernels.h against a plain computation on the host, on odd shapes.
// What is shared out over compute threads runs with one thread and with two: 16384 elements are the
// least that a second thread is woken for.

#include "common/kernels/kernels.h"
#include "common/core/error.h"

#include <array>
#include <functional>
#include <numeric>

#include "common/kernels/bodies/dropout.inl"
#include "tests/support/catch.h"
#include "tests/support/nn_test_support.h"

namespace lockstep {
namespace {

using testing::kDouble;
using testing::random_values;
using testing::relative_error;
using testing::TestDevice;
using Values = std::vector<Real>;
using Doubles = std::vector<double>;

// A few roundings, and sums of some thousand terms.
constexpr double kRounding = kDouble ? 1e-14 : 1e-6;
constexpr double kSums = kDouble ? 1e-12 : 1e-5;
constexpr Real kNaN = std::numeric_limits<Real>::quiet_NaN();
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

Values with_each(const Values& x, const std::function<Real(Real)>& f) {
  Values y = x;
  for (Real& value : y) value = f(value);
  return y;
}

// --- Element by element ------------------------------------------------------------------------

TEST_CASE("Fill, add, scale and add_relu are what their names say", "[kernels]") {
  const TestDevice d(GENERATE(1, 2));
  const Shape shape{67, 7, 5, 9};
  const Values a = random_values(shape, 1), b = random_values(shape, 2);
  const Tensor x = d.put(shape, a), y = d.put(shape, b);
  Values sum = b, scaled = b, positive = b;
  for (size_t i = 0; i < a.size(); ++i) {
    sum[i] = b[i] + a[i];
    scaled[i] = sum[i] * Real(0.3);
    positive[i] = std::max(Real(0), a[i] + scaled[i]);
  }
  d.kernels().add(d.stream, x, y);
  CHECK(y.to_host() == sum);
  d.kernels().scale(d.stream, Real(0.3), y);
  CHECK(y.to_host() == scaled);
  const Tensor z = d.filled(shape, kNaN);
  d.kernels().add_relu(d.stream, x, y, z);
  CHECK(relative_error(z.to_host(), positive) <= kRounding);
  d.kernels().fill(d.stream, Real(-2.5), y);
  CHECK(y.to_host() == Values(a.size(), Real(-2.5)));
  const CountTensor count = CountTensor::from_host(d.stream, {3}, {1, 2, 3});
  d.kernels().fill_count(d.stream, int64_t{1} << 40, count);
  CHECK(count.to_host() == std::vector<int64_t>(3, int64_t{1} << 40));
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
  d.kernels().add_relu(d.stream, x, d.filled({6}, 1), y);
  CHECK(std::isnan(y.to_host()[5]));

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
  Doubles sums(bias.begin(), bias.end());  // the gradient is ADDED to what stands there
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

// --- Collectives in one process ----------------------------------------------------------------

/// A rank's numbers whose sums round: their order shows in the last bits.
template <class T>
std::vector<T> rank_values(int64_t count, uint32_t rank) {
  std::vector<T> values;
  for (const Real value : random_values({count}, rank + 1)) {
    values.push_back(std::is_integral_v<T> ? T(value * Real(1 << 20)) : T(value) / T(rank + 3));
  }
  return values;
}

/// `targets` sums over `sources` ranks; every second target is one of the sources.
template <class T>
void check_sum_ranks(const TestDevice& d, ElementType type, int64_t count, int sources, int targets,
                     double factor) {
  INFO(count << " elements, " << sources << " sources, " << targets << " targets");
  RankSum sum{.type = type, .count = count, .factor = factor};
  sum.sources = sources;
  sum.targets = targets;
  std::vector<BasicTensor<T>> from, to;
  std::vector<T> expected;
  for (int s = 0; s < sources; ++s) {
    const std::vector<T> values = rank_values<T>(count, uint32_t(s));
    from.push_back(BasicTensor<T>::from_host(d.stream, {count}, values));
    sum.source[s] = from[s].data();
    expected.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i)
      expected[i] = s ? expected[i] + values[i] : values[i];
  }
  for (T& value : expected) value *= static_cast<T>(factor);
  for (int t = 0; t < targets; ++t) {
    const bool is_source = t % 2 == 1 && t < sources;
    to.push_back(is_source ? from[t] : BasicTensor<T>::empty(d.stream, {count}));
    sum.target[t] = to[t].data();
  }
  d.kernels().sum_ranks(d.stream, sum);
  for (const BasicTensor<T>& target : to) CHECK(target.to_host() == expected);
  for (int s = 0; s < sources; s += s < targets ? 2 : 1) {  // sources that are no target stay
    CHECK(from[s].to_host() == rank_values<T>(count, uint32_t(s)));
  }
}

TEST_CASE("Ranks are summed bitwise in their order, for every target and up to sixteen of them",
          "[kernels][comm]") {
  const TestDevice d(GENERATE(1, 2));
  for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
    check_sum_ranks<float>(d, ElementType::f32, 37, ranks, ranks, 1);
    check_sum_ranks<double>(d, ElementType::f64, 37, ranks, 1, 1.0 / ranks);
    check_sum_ranks<int64_t>(d, ElementType::i64, 37, ranks, (ranks + 1) / 2, 1);
  }
  for (const int64_t count : {0, 1, 7, 20011}) {
    check_sum_ranks<float>(d, ElementType::f32, count, 3, 2, 1.0 / 3);
    check_sum_ranks<double>(d, ElementType::f64, count, 2, kMostRanks, 0.5);
    check_sum_ranks<int64_t>(d, ElementType::i64, count, 5, 5, 1);
  }
}

// --- Convolution and matrix product ------------------------------------------------------------

Window2d window(int64_t batch, int64_t height, int64_t width, int64_t in, int64_t out,
                int64_t kernel, int64_t stride, int64_t padding) {
  return make_window("test", {batch, height, width, in}, in, out, kernel, stride, padding);
}

struct ConvInputs {
  explicit ConvInputs(const Window2d& g)
      : x(random_values(g.input(), 1)),
        weight(random_values(g.weight(), 2)),
        bias(random_values({g.out_channels}, 3)),
        dy(random_values(g.output(), 4)) {}
  Values x, weight, bias, dy;
};

template <class T>
struct ConvResults {
  std::vector<T> y, dx, dweight, dbias;
};

/// The definition: seven loops, sums in double. Gradients of parameters are added to what
/// ConvInputs has in their place.
ConvResults<double> convolve_by_definition(const Window2d& g, const ConvInputs& in) {
  ConvResults<double> out{Doubles(in.dy.size()), Doubles(in.x.size()),
                          Doubles(in.weight.begin(), in.weight.end()),
                          Doubles(in.bias.begin(), in.bias.end())};
  size_t to = 0;
  for (int64_t n = 0; n < g.batch; ++n)
    for (int64_t oh = 0; oh < g.out_height; ++oh)
      for (int64_t ow = 0; ow < g.out_width; ++ow)
        for (int64_t o = 0; o < g.out_channels; ++o, ++to) {
          out.y[to] = in.bias[o];
          out.dbias[o] += in.dy[to];
          for (int64_t kh = 0; kh < g.kernel; ++kh)
            for (int64_t kw = 0; kw < g.kernel; ++kw) {
              const int64_t h = oh * g.stride - g.padding + kh;
              const int64_t w = ow * g.stride - g.padding + kw;
              if (h < 0 || h >= g.in_height || w < 0 || w >= g.in_width) continue;
              for (int64_t i = 0; i < g.in_channels; ++i) {
                const int64_t from = ((n * g.in_height + h) * g.in_width + w) * g.in_channels + i;
                const int64_t tap = ((o * g.kernel + kh) * g.kernel + kw) * g.in_channels + i;
                out.y[to] += double(in.x[from]) * in.weight[tap];
                out.dx[from] += double(in.dy[to]) * in.weight[tap];
                out.dweight[tap] += double(in.dy[to]) * in.x[from];
              }
            }
        }
  return out;
}

ConvResults<Real> convolve(const TestDevice& d, const Window2d& g, const ConvInputs& in) {
  const Tensor x = d.put(g.input(), in.x), weight = d.put(g.weight(), in.weight);
  const Tensor bias = d.put({g.out_channels}, in.bias), dy = d.put(g.output(), in.dy);
  const Tensor y = d.filled(g.output(), kNaN), dx = d.filled(g.input(), kNaN);
  d.kernels().conv2d(d.stream, g, x, weight, bias, y);
  d.kernels().conv2d_backward_input(d.stream, g, dy, weight, dx);
  const Tensor dweight = d.put(g.weight(), in.weight), dbias = d.put({g.out_channels}, in.bias);
  d.kernels().conv2d_backward_parameters(d.stream, g, x, dy, dweight, dbias);
  return {y.to_host(), dx.to_host(), dweight.to_host(), dbias.to_host()};
}

template <class T>
double worst_error(const ConvResults<Real>& found, const ConvResults<T>& expected) {
  return std::max({relative_error(found.y, expected.y), relative_error(found.dx, expected.dx),
                   relative_error(found.dweight, expected.dweight),
                   relative_error(found.dbias, expected.dbias)});
}

std::string text(const Window2d& g) {
  return fmt::format("{} -> {}, kernel {}, stride {}, padding {}", g.input().text(),
                     g.output().text(), g.kernel, g.stride, g.padding);
}

std::vector<Window2d> odd_windows() {
  return {window(1, 1, 1, 1, 1, 1, 1, 0),    window(1, 7, 5, 3, 4, 3, 1, 0),
          window(2, 7, 5, 3, 17, 3, 2, 1),   window(3, 5, 7, 1, 2, 5, 1, 2),
          window(1, 9, 6, 5, 3, 2, 3, 0),    window(2, 4, 4, 18, 33, 1, 2, 0),
          window(2, 6, 11, 4, 7, 4, 2, 3),   window(5, 3, 3, 2, 16, 3, 1, 2),
          window(1, 13, 8, 20, 10, 5, 1, 0), window(0, 7, 5, 3, 4, 3, 1, 0),
          window(3, 9, 7, 5, 6, 1, 2, 0),    window(2, 5, 8, 3, 4, 1, 3, 1)};
}

/// Both convolutions of the seed network, and all different ones of ResNet-18.
std::vector<Window2d> model_windows(int64_t batch, int64_t w, int64_t image) {
  std::vector<Window2d> all{
      window(batch, 28, 28, 1, 10, 5, 1, 0), window(batch, 12, 12, 10, 20, 5, 1, 0),
      window(batch, image, image, 1, w, 3, 1, 1), window(batch, image, image, w, w, 3, 1, 1)};
  for (int64_t side = image, in = w; in < 8 * w; in *= 2) {
    all.push_back(window(batch, side, side, in, 2 * in, 3, 2, 1));
    all.push_back(window(batch, side, side, in, 2 * in, 1, 2, 0));
    side = (side + 1) / 2;
    all.push_back(window(batch, side, side, 2 * in, 2 * in, 3, 1, 1));
  }
  return all;
}

TEST_CASE("Convolution, forward and backward, is what its definition says", "[kernels]") {
  for (const auto engine : {cpu::EngineKind::best, cpu::EngineKind::reference}) {
    for (const int threads : {1, 2}) {
      const TestDevice d(threads, engine);
      for (const Window2d& g : odd_windows()) {
        const ConvInputs in(g);
        INFO(d.device->description() << ": " << text(g));
        CHECK(worst_error(convolve(d, g, in), convolve_by_definition(g, in)) <= kSums);
      }
    }
  }
}

TEST_CASE("Every convolution of the models agrees with the reference engine on one thread",
          "[kernels]") {
  const TestDevice reference(1, cpu::EngineKind::reference);
  // oneDNN takes other paths for other channel counts; the reference engine does not.
  const bool other_engine = TestDevice().kernels().engine() != reference.kernels().engine();
  for (const int threads : {1, 2}) {
    if (threads == 1 && !other_engine) continue;  // that would be the reference itself
    const TestDevice d(threads);
    std::vector<Window2d> windows = model_windows(3, 8, 28);
    if (threads == 1) {
      for (const Window2d& g : model_windows(1, 64, 28)) windows.push_back(g);
      for (const Window2d& g : model_windows(2, 16, 32)) windows.push_back(g);
    }
    for (const Window2d& g : windows) {
      const ConvInputs in(g);
      INFO(d.device->description() << ": " << text(g));
      CHECK(worst_error(convolve(d, g, in), convolve(reference, g, in)) <= kSums);
    }
  }
}

TEST_CASE("One stream convolves many shapes in turn, and the same shape again", "[kernels]") {
  // Plans and workspaces are kept per worker: neither may leak from one shape into another.
  const TestDevice d;
  std::vector<Window2d> windows = odd_windows();
  const size_t again = windows.size();
  windows.insert(windows.end(), {windows[1], windows[7], windows[1]});
  std::vector<Values> outputs;
  for (const Window2d& g : windows) outputs.push_back(convolve(d, g, ConvInputs(g)).y);
  CHECK(outputs[again] == outputs[1]);
  CHECK(outputs[again + 1] == outputs[7]);
  CHECK(outputs[again + 2] == outputs[1]);
}

Doubles multiply_by_definition(const MatMul& s, const Values& a, const Values& b, const Values& c) {
  Doubles product(c.size());
  for (int64_t i = 0; i < s.m; ++i) {
    for (int64_t j = 0; j < s.n; ++j) {
      double sum = s.accumulate ? c[i * s.n + j] : 0;
      for (int64_t p = 0; p < s.k; ++p) {
        sum += double(s.transpose_a ? a[p * s.m + i] : a[i * s.k + p]) *
               (s.transpose_b ? b[j * s.k + p] : b[p * s.n + j]);
      }
      product[i * s.n + j] = sum;
    }
  }
  return product;
}

TEST_CASE("Matrix products are what their definition says, transposed and accumulated",
          "[kernels]") {
  // The last three are those of the seed network's first linear layer; before them, nothing.
  const std::vector<std::array<int64_t, 3>> sizes{
      {1, 1, 1},   {3, 5, 7},   {33, 1, 17},   {1, 10, 50},   {0, 10, 50},
      {10, 0, 50}, {50, 10, 0}, {12, 50, 320}, {12, 320, 50}, {50, 320, 12}};
  for (const auto engine : {cpu::EngineKind::best, cpu::EngineKind::reference}) {
    for (const int threads : {1, 2}) {
      const TestDevice d(threads, engine);
      for (const auto& [m, n, k] : sizes) {
        for (int variant = 0; variant < 8; ++variant) {
          const MatMul s{.m = m,
                         .n = n,
                         .k = k,
                         .transpose_a = (variant & 1) != 0,
                         .transpose_b = (variant & 2) != 0,
                         .accumulate = (variant & 4) != 0};
          const Shape a_shape{s.m, s.k}, b_shape{s.k, s.n}, c_shape{s.m, s.n};
          const Values a = random_values(a_shape, 1), b = random_values(b_shape, 2);
          // What is overwritten may be anything, what is added to may not.
          const Values c = s.accumulate ? random_values(c_shape, 3) : Values(s.m * s.n, kNaN);
          const Tensor product = d.put(c_shape, c);
          d.kernels().matmul(d.stream, s, d.put(a_shape, a), d.put(b_shape, b), product);
          INFO(d.device->description()
               << ": m " << s.m << " n " << s.n << " k " << s.k << " variant " << variant);
          CHECK(relative_error(product.to_host(), multiply_by_definition(s, a, b, c)) <= kSums);
        }
      }
    }
  }
}

// --- Pooling -------------------------------------------------------------------------------------

struct Pooled {
  Values y;
  std::vector<int32_t> where;
  Values dx;
};

Pooled max_pool(const TestDevice& d, const Window2d& g, bool relu, const Values& x,
                const Values& dy) {
  const Tensor y = d.filled(g.output(), 0), dx = d.filled(g.input(), kNaN);
  const IndexTensor where = IndexTensor::empty(d.stream, g.output());
  d.kernels().max_pool2d(d.stream, g, relu, d.put(g.input(), x), y, where);
  d.kernels().max_pool2d_backward(d.stream, g, d.put(g.output(), dy), where, dx);
  return {y.to_host(), where.to_host(), dx.to_host()};
}

/// By walking the windows; backward scatters.
Pooled max_pool_by_definition(const Window2d& g, bool relu, const Values& x, const Values& dy) {
  Pooled out{Values(dy.size()), std::vector<int32_t>(dy.size()), Values(x.size())};
  for (size_t to = 0; to < dy.size(); ++to) {
    const int64_t c = to % g.out_channels, ow = to / g.out_channels % g.out_width;
    const int64_t oh = to / (g.out_channels * g.out_width) % g.out_height;
    const int64_t n = to / (g.out_channels * g.out_width * g.out_height);
    const auto at = [&](int64_t position) {
      const int64_t h = oh * g.stride + position / g.kernel;
      const int64_t w = ow * g.stride + position % g.kernel;
      return ((n * g.in_height + h) * g.in_width + w) * g.in_channels + c;
    };
    int64_t best = 0;
    for (int64_t p = 1; p < g.kernel * g.kernel; ++p) best = x[at(p)] > x[at(best)] ? p : best;
    const bool cut = relu && x[at(best)] <= 0;
    out.y[to] = cut ? 0 : x[at(best)];
    out.where[to] = static_cast<int32_t>(cut ? -1 : best);
    if (!cut) out.dx[at(best)] += dy[to];
  }
  return out;
}

TEST_CASE("Max-pooling finds the largest of each window, and its gradient goes there",
          "[kernels]") {
  const std::vector<Window2d> windows{
      window(2, 6, 8, 3, 3, 2, 2, 0),     // side by side, covering: the tiled backward
      window(41, 8, 8, 8, 8, 2, 2, 0),    // the same, enough for two threads
      window(2, 5, 7, 3, 3, 2, 2, 0),     // a row and a column are left over
      window(37, 9, 7, 9, 9, 3, 2, 0),    // overlapping
      window(1, 6, 5, 2, 2, 2, 1, 0),     // stride 1
      window(1, 15, 16, 1, 1, 15, 1, 0),  // the largest window
      window(2, 11, 11, 1, 1, 2, 4, 0)};  // pixels between the windows
  for (const int threads : {1, 2}) {
    const TestDevice d(threads);
    for (const Window2d& g : windows) {
      const Values x = random_values(g.input(), 1), dy = random_values(g.output(), 2);
      for (const bool relu : {false, true}) {
        INFO(text(g) << ", relu " << relu << ", threads " << threads);
        const Pooled found = max_pool(d, g, relu, x, dy);
        const Pooled expected = max_pool_by_definition(g, relu, x, dy);
        CHECK(found.y == expected.y);
        CHECK(found.where == expected.where);
        CHECK(relative_error(found.dx, expected.dx) <= kRounding);
      }
    }
  }
}

TEST_CASE("In max-pooling the first of equal values wins and NaN beats all", "[kernels]") {
  const TestDevice d;
  const Window2d tiled = window(1, 2, 8, 1, 1, 2, 2, 0);
  const Values x{1, 1, 0, 2, kNaN, 9, -1, -1,  //
                 1, 1, 2, 2, 9,    9, -1, kNaN};
  const Pooled found = max_pool(d, tiled, /*relu=*/true, x, {1, 2, 3, 4});
  CHECK(found.y[0] == 1);
  CHECK(found.y[1] == 2);
  CHECK(std::isnan(found.y[2]));
  CHECK(std::isnan(found.y[3]));
  CHECK(found.where == std::vector<int32_t>{0, 1, 0, 3});
  CHECK(found.dx == Values{1, 0, 0, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4});
  // The same by the body for any window: 3x3 over equal values.
  const Pooled flat = max_pool(d, window(1, 3, 3, 1, 1, 3, 1, 0), false, Values(9, -5), {1});
  CHECK(flat.y == Values{-5});
  CHECK(flat.where == std::vector<int32_t>{0});
  // A window whose maximum is exactly 0 counts as cut by the fused ReLU.
  const Pooled zero = max_pool(d, window(1, 2, 2, 1, 1, 2, 2, 0), true, {-1, 0, -2, -3}, {1});
  CHECK(zero.y == Values{0});
  CHECK(zero.where == std::vector<int32_t>{-1});
  CHECK(zero.dx == Values(4, 0));
}

TEST_CASE("Adaptive average pooling averages PyTorch's ranges, backward spreads them",
          "[kernels]") {
  struct Sizes {
    int64_t batch, height, width, out_height, out_width, channels;
  };
  for (const Sizes& s : {Sizes{2, 7, 5, 3, 2, 3}, Sizes{97, 4, 4, 1, 1, 19},
                         Sizes{1, 5, 6, 5, 6, 2}, Sizes{2, 2, 3, 3, 7, 1}}) {
    const TestDevice d(2);
    const Shape in{s.batch, s.height, s.width, s.channels};
    const Shape out{s.batch, s.out_height, s.out_width, s.channels};
    const Values x = random_values(in, 1), dy = random_values(out, 2);
    Doubles y(dy.size()), dx(x.size());
    for (size_t to = 0; to < dy.size(); ++to) {
      const int64_t c = to % s.channels, ow = to / s.channels % s.out_width;
      const int64_t oh = to / (s.channels * s.out_width) % s.out_height;
      const int64_t n = to / (s.channels * s.out_width * s.out_height);
      std::vector<int64_t> range;
      for (int64_t h = 0; h < s.height; ++h) {
        for (int64_t w = 0; w < s.width; ++w) {
          // Pixel h of `height` and cell oh of `out_height` overlap as intervals of the image.
          const bool rows =
              h * s.out_height < (oh + 1) * s.height && (h + 1) * s.out_height > oh * s.height;
          const bool columns =
              w * s.out_width < (ow + 1) * s.width && (w + 1) * s.out_width > ow * s.width;
          if (rows && columns) range.push_back(((n * s.height + h) * s.width + w) * s.channels + c);
        }
      }
      for (const int64_t from : range) {
        y[to] += double(x[from]) / double(range.size());
        dx[from] += double(dy[to]) / double(range.size());
      }
    }
    INFO(in.text() << " -> " << out.text());
    const Tensor found = d.filled(out, kNaN), slope = d.filled(in, kNaN);
    d.kernels().adaptive_avg_pool2d(d.stream, d.put(in, x), found);
    d.kernels().adaptive_avg_pool2d_backward(d.stream, d.put(out, dy), slope);
    CHECK(relative_error(found.to_host(), y) <= kRounding);
    CHECK(relative_error(slope.to_host(), dx) <= kRounding);
  }
}

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
  kernels.batch_norm_backward_sums(d.stream, input, slope, norm, w, b, relu, sums);
  kernels.batch_norm_backward_parameters(d.stream, norm, sums, dweight, dbias);
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

// --- Dropout -------------------------------------------------------------------------------------

TEST_CASE("Philox4x32-10 gives the known answers of its authors", "[kernels]") {
  struct Answer {
    uint32_t counter[4], key[2], expected[4];
  };
  const Answer answers[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {0xffffffff, 0xffffffff},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
  for (const auto& [c, k, expected] : answers) {
    const auto found = bodies::Philox::generate(c[0], c[1], c[2], c[3], k[0], k[1]);
    CHECK(std::equal(expected, expected + 4, found.word));
  }
}

Values dropout_mask(const TestDevice& d, const StepState& state, DropoutKey key, Real p,
                    const Shape& shape) {
  const Tensor mask = d.filled(shape, kNaN);
  d.kernels().dropout_mask(d.stream, d.state(state), key, p, mask);
  return mask.to_host();
}

TEST_CASE("The dropout mask is decided by the upper 24 bits of Philox's words", "[kernels]") {
  // Counter 0 and key 0: the first sample of step 0, features 0 to 3. Word w drops its feature as
  // soon as p exceeds (w >> 8) / 2^24, in float and in double.
  const TestDevice d;
  const uint32_t words[] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  for (size_t feature = 0; feature < 4; ++feature) {
    const Real uniform = Real(words[feature] >> 8) / 16777216;
    const Real above = uniform + Real(1) / 16777216;
    CHECK(dropout_mask(d, {}, {}, uniform, {1, 4})[feature] == 1 / (1 - uniform));
    CHECK(dropout_mask(d, {}, {}, above, {1, 4})[feature] == 0);
  }
}

TEST_CASE("The dropout mask does not depend on how the batch is split", "[kernels]") {
  const TestDevice d(2);
  const DropoutKey key{.seed = 5, .layer = 77};
  const StepState whole{.step = 3, .first_position = 100};
  const int64_t samples = 12, features = 1501;
  const Values mask = dropout_mask(d, whole, key, Real(0.5), {samples, features});
  for (const int64_t parts : {2, 3, 4}) {
    for (int64_t part = 0; part < parts; ++part) {
      StepState chunk = whole, strided = whole;
      chunk.first_position += part * (samples / parts);
      strided.first_position += part;
      strided.position_stride = parts;
      const Shape shape{samples / parts, features};
      const Values a = dropout_mask(d, chunk, key, Real(0.5), shape);
      const Values b = dropout_mask(d, strided, key, Real(0.5), shape);
      for (int64_t n = 0; n < samples / parts; ++n) {
        const auto row = [&](const Values& m, int64_t i) { return m.begin() + i * features; };
        CHECK(std::equal(row(a, n), row(a, n + 1), row(mask, part * (samples / parts) + n)));
        CHECK(std::equal(row(b, n), row(b, n + 1), row(mask, part + n * parts)));
      }
    }
  }
}

TEST_CASE("The dropout mask of some features is that part of the whole mask", "[kernels]") {
  const TestDevice d;
  const StepState state{.step = 3, .first_position = 100};
  const int64_t samples = 5, features = 40, count = 9;
  const Values whole = dropout_mask(d, state, {1, 2}, Real(0.5), {samples, features});
  for (const int64_t first : {0, 1, 4, 6, 31}) {  // words of one counter, and of several
    INFO("from feature " << first);
    const DropoutKey key{.seed = 1, .layer = 2, .first_feature = first};
    const Values part = dropout_mask(d, state, key, Real(0.5), {samples, count});
    for (int64_t n = 0; n < samples; ++n) {
      CHECK(std::equal(part.begin() + n * count, part.begin() + (n + 1) * count,
                       whole.begin() + n * features + first));
    }
  }
}

TEST_CASE("Dropout masks differ by step, seed, layer and sample, and keep the asked share",
          "[kernels]") {
  const TestDevice d;
  const int64_t samples = 40, features = 2500;
  const Shape shape{samples, features};
  const Values mask = dropout_mask(d, {}, {.seed = 1, .layer = 1}, Real(0.25), shape);
  const Real kept = Real(1) / Real(0.75);
  const int64_t n = samples * features, keeps = std::count(mask.begin(), mask.end(), kept);
  CHECK(keeps + std::count(mask.begin(), mask.end(), Real(0)) == n);
  // Two independent masks agree in p^2 + (1-p)^2 of the elements. Five standard deviations, and the
  // numbers are the same in every run.
  const auto within = [&](int64_t hits, double p, int64_t of) {
    return std::abs(double(hits) - p * double(of)) <= 5 * std::sqrt(p * (1 - p) * double(of));
  };
  CHECK(within(keeps, 0.75, n));
  const auto agree = [](const Values& a, const Values& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), int64_t{0}, std::plus<>(),
                              [](Real x, Real y) { return int64_t{x == y}; });
  };
  const int64_t far = int64_t{1} << 33;  // beyond 32 bits
  CHECK(within(agree(mask, dropout_mask(d, {.step = 1}, {1, 1}, Real(0.25), shape)), 0.625, n));
  CHECK(within(agree(mask, dropout_mask(d, {.step = far}, {1, 1}, Real(0.25), shape)), 0.625, n));
  CHECK(within(agree(mask, dropout_mask(d, {}, {2, 1}, Real(0.25), shape)), 0.625, n));
  CHECK(within(agree(mask, dropout_mask(d, {}, {1, 2}, Real(0.25), shape)), 0.625, n));
  const StepState elsewhere{.first_position = far};
  CHECK(within(agree(mask, dropout_mask(d, elsewhere, {1, 1}, Real(0.25), shape)), 0.625, n));
  const Values first(mask.begin(), mask.begin() + n / 2), second(mask.begin() + n / 2, mask.end());
  CHECK(within(agree(first, second), 0.625, n / 2));
  // Nothing is dropped with probability 0.
  CHECK(dropout_mask(d, {}, {1, 1}, 0, shape) == Values(static_cast<size_t>(n), 1));
}

TEST_CASE("A mask multiplies element by element, or whole channels", "[kernels]") {
  const TestDevice d(2);
  const int64_t samples = 6, pixels = 7 * 61, channels = 9;
  const Shape nhwc{samples, 7, 61, channels};
  const Values x = random_values(nhwc, 1), per_channel = random_values({samples, channels}, 2);
  const Values per_element = random_values({samples, pixels * channels}, 3);
  Values channel_wise = x, element_wise = x;
  for (int64_t i = 0; i < nhwc.elements(); ++i) {
    channel_wise[i] *= per_channel[i / (pixels * channels) * channels + i % channels];
    element_wise[i] *= per_element[i];
  }
  const Tensor y = d.filled(nhwc, 0);
  d.kernels().apply_mask(d.stream, d.put(nhwc, x), d.put({samples, channels}, per_channel), y);
  CHECK(y.to_host() == channel_wise);
  const Shape flat{samples, pixels * channels};
  d.kernels().apply_mask(d.stream, d.put(flat, x), d.put(flat, per_element), y.reshaped(flat));
  CHECK(y.to_host() == element_wise);
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

// --- Optimizer -----------------------------------------------------------------------------------

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
                           rule, gradient, velocity, weight);
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
    d.kernels().sgd_update(d.stream, d.state({.step = t, .learning_rate = Real(0.1)}), health, rule,
                           d.put({3}, g), velocity, weight);
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
                         {.momentum = Real(0.5)}, d.filled({100}, kNaN), velocity, weight);
  d.kernels().sgd_update(d.stream, d.state({.step = 2, .learning_rate = 1}), health, {},
                         d.filled({100}, 1), Tensor(), weight);
  CHECK(weight.to_host() == w);
  CHECK(velocity.to_host() == v);
}

TEST_CASE("Gradients are clipped together, as torch.nn.utils.clip_grad_norm_ does", "[kernels]") {
  const TestDevice d;
  for (const int64_t n : {int64_t{1}, int64_t{5}, Kernels::kNormPart, 2 * Kernels::kNormPart + 3}) {
    const Values values = random_values({n}, 7);
    double sum = 0;
    for (const Real value : values) sum += double(value) * double(value);
    const double length = std::sqrt(sum);
    for (const double most : {length / 3, 2 * length}) {
      INFO(n << " numbers, at most " << most);
      const Tensor x = d.put({n}, values);
      const Tensor norm = d.filled({1 + (n + Kernels::kNormPart - 1) / Kernels::kNormPart}, kNaN);
      d.kernels().clip_norm(d.stream, Real(most), x, norm);
      CHECK(double(norm.to_host()[0]) == Approx(length).epsilon(testing::kTolerance));
      Doubles expected(values.begin(), values.end());
      for (double& value : expected) value *= std::min(1.0, most / (length + 1e-6));
      CHECK(relative_error(x.to_host(), expected) <= testing::kTolerance);
    }
  }
  // PyTorch takes the length for 1e-6 more, which shows where that is not little.
  const Tensor tiny = d.put({2}, {Real(3e-6), Real(4e-6)});
  d.kernels().clip_norm(d.stream, Real(1e-6), tiny, d.filled({2}, 0));
  CHECK(relative_error(tiny.to_host(), Doubles{3e-6 / 6, 4e-6 / 6}) <= testing::kTolerance);
  const Tensor spoilt = d.put({3}, {1, kNaN, 2});
  d.kernels().clip_norm(d.stream, 1, spoilt, d.filled({2}, 0));
  for (const Real value : spoilt.to_host()) CHECK(std::isnan(value));  // the watch will see it
}

}  // namespace
}  // namespace lockstep
