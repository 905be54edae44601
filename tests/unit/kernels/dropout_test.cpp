// Random numbers of dropout and its masks.

#include "common/core/error.h"

#include <functional>
#include <numeric>

#include "common/kernels/bodies/dropout.inl"
#include "tests/support/catch.h"
#include "tests/support/nn_test_support.h"
#include "tests/unit/kernels/kernels_test_support.h"

namespace lockstep {
namespace {

using namespace testing::kernels;
using testing::random_values;
using testing::TestDevice;
using Values = std::vector<Real>;

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

}  // namespace
}  // namespace lockstep
