// Convolutions and matrix products against their definition, on odd shapes, with one compute thread
// and with two.

#include <array>

#include "common/kernels/cpu/few_channels.h"
#include "common/kernels/cpu/winograd.h"
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

// --- Convolution and matrix product ------------------------------------------------------------

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

/// The definition: seven loops, sums in double. Gradients of parameters are added to the values
/// that ConvInputs has in their place.
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
              // Plain pointers and sums: test code is not optimised.
              const int64_t from = ((n * g.in_height + h) * g.in_width + w) * g.in_channels;
              const int64_t tap = ((o * g.kernel + kh) * g.kernel + kw) * g.in_channels;
              const Real *const x = &in.x[from], *const weight = &in.weight[tap];
              double *const dx = &out.dx[from], *const dweight = &out.dweight[tap];
              const double dy = in.dy[to];
              double y = 0;
              for (int64_t i = 0; i < g.in_channels; ++i) {
                y += double(x[i]) * weight[i];
                dx[i] += dy * weight[i];
                dweight[i] += dy * x[i];
              }
              out.y[to] += y;
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

/// Shapes that the CPU backend computes by Winograd's way: several pieces, tiles that are cut off,
/// all paddings.
std::vector<Window2d> winograd_windows() {
  return {window(3, 14, 14, 64, 64, 3, 1, 1), window(8, 7, 7, 64, 96, 3, 1, 1),
          window(2, 19, 21, 80, 64, 3, 1, 0), window(1, 23, 30, 64, 64, 3, 1, 2),
          window(20, 15, 14, 64, 64, 3, 1, 1)};
}

TEST_CASE("Convolutions by Winograd's way are what their definition says", "[kernels]") {
  for (const Window2d& g : winograd_windows()) {
    CHECK(cpu::winograd::fits(g) == cpu::kWideVectors);
    const ConvInputs in(g);
    const auto expected = convolve_by_definition(g, in);
    for (const int threads : {1, 2}) {
      const TestDevice d(threads);
      INFO(d.device->description() << ": " << text(g));
      CHECK(worst_error(convolve(d, g, in), expected) <= kSums);
    }
  }
}

TEST_CASE("Convolutions of few channels are what their definition says", "[kernels]") {
  using cpu::few_channels::fits, cpu::few_channels::fits_backward_input;
  for (const int threads : {1, 2, 3}) {
    const TestDevice d(threads);
    for (const Window2d& g : {window(16, 9, 11, 10, 20, 5, 1, 0), window(48, 12, 8, 1, 10, 5, 1, 0),
                              window(32, 6, 13, 3, 10, 5, 1, 0)}) {
      const ConvInputs in(g);
      INFO(d.device->description() << ": " << text(g));
      CHECK(fits(g) == cpu::kWideVectors);
      CHECK(fits_backward_input(g) == (cpu::kWideVectors && g.in_channels == 10));
      CHECK(worst_error(convolve(d, g, in), convolve_by_definition(g, in)) <= kSums);
    }
  }
  CHECK_FALSE(fits(window(17, 9, 11, 10, 20, 5, 1, 0)));  // not whole vectors of samples
  CHECK_FALSE(fits(window(16, 9, 11, 10, 20, 5, 2, 0)));
  CHECK_FALSE(fits(window(16, 9, 11, 10, 20, 5, 1, 1)));
  CHECK_FALSE(fits(window(16, 9, 11, 10, 20, 3, 1, 0)));
  CHECK_FALSE(fits(window(16, 9, 11, 20, 20, 5, 1, 0)));
  CHECK_FALSE(fits(window(16, 9, 11, 10, 15, 5, 1, 0)));
  CHECK_FALSE(fits(window(16, 9, 7, 10, 20, 5, 1, 0)));  // too narrow
}

TEST_CASE("Winograd's way is not taken where it does not pay", "[kernels]") {
  using cpu::winograd::fits;
  CHECK_FALSE(fits(window(64, 28, 28, 64, 64, 5, 1, 0)));  // another kernel
  CHECK_FALSE(fits(window(64, 28, 28, 64, 64, 3, 2, 1)));  // a stride
  CHECK_FALSE(fits(window(64, 28, 28, 32, 64, 3, 1, 1)));  // few channels
  CHECK_FALSE(fits(window(64, 28, 28, 64, 72, 3, 1, 1)));  // not whole vectors of them
  CHECK_FALSE(fits(window(31, 4, 4, 512, 512, 3, 1, 1)));  // few tiles
  CHECK_FALSE(fits(window(256, 5, 5, 64, 64, 3, 1, 1)));   // tiles that are cut to less than half
  CHECK(fits(window(32, 4, 4, 512, 512, 3, 1, 1)) == cpu::kWideVectors);
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
  // Primitives and workspaces are kept per worker: neither may leak from one shape into another.
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

}  // namespace
}  // namespace lockstep
