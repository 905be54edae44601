// Numbers of 16 bits: what each is worth, and which one a float32 becomes.

#include "common/core/sixteen_bits.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "common/core/text.h"
#include "tests/support/catch.h"

namespace lockstep {
namespace {

constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();

/// What IEEE 754 says of a format with a sign, so many bits of exponent, and the rest.
struct Format {
  std::string name;
  int exponent_bits;
  uint16_t infinity, nan;  // without a sign; the NaN that ours become

  int fraction_bits() const { return 15 - exponent_bits; }
  /// The value of a finite number of this format.
  double value(uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> fraction_bits(), bias = (1 << (exponent_bits - 1)) - 1;
    const int fraction = bits & ((1 << fraction_bits()) - 1);
    const int one = exponent == 0 ? 0 : 1 << fraction_bits();  // subnormals have no leading one
    const double size = std::ldexp(one + fraction, std::max(exponent, 1) - bias - fraction_bits());
    return bits & 0x8000 ? -size : size;
  }
};

template <class T>
Format format_of() {
  if constexpr (std::is_same_v<T, Bf16>) {
    return {"bf16", 8, 0x7f80, 0x7fc0};
  } else {
    return {"fp16", 5, 0x7c00, 0x7e00};
  }
}

template <class T>
T from_bits(uint32_t bits) {
  return std::bit_cast<T>(uint16_t(bits));
}

/// Counts what is wrong, and remembers the first: an assertion for each number would take long.
struct Faults {
  void expect(bool holds, float x, uint32_t found, uint32_t expected) {
    if (holds) return;
    if (count++ == 0)
      first = fmt::format("{:a}: found {:04x}, expected {:04x}", x, found, expected);
  }
  template <class T>
  void expect_rounded(float x, uint32_t expected) {
    const uint32_t found = T(x).bits;
    expect(found == expected, x, found, expected);
  }
  int64_t count = 0;
  std::string first{};
};

#define CHECK_NONE(faults)                                       \
  do {                                                           \
    INFO((faults).count << " faults, first " << (faults).first); \
    CHECK((faults).count == 0);                                  \
  } while (false)

template <class T>
void check_all_values() {
  const Format format = format_of<T>();
  INFO(format.name);
  Faults values, back;
  int64_t nans = 0;
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float x = from_bits<T>(bits);
    const uint32_t size = bits & 0x7fff, sign = bits & 0x8000;
    if (size > format.infinity) {
      ++nans;
      values.expect(std::isnan(x), x, bits, bits);
      back.expect((T(x).bits & 0x7fff) == format.nan, x, T(x).bits, format.nan);
      continue;
    }
    const double expected = size < format.infinity ? format.value(uint16_t(bits))
                            : sign != 0            ? -double(kFloatInfinity)
                                                   : double(kFloatInfinity);
    values.expect(double(x) == expected && std::signbit(x) == (sign != 0), x, bits, bits);
    back.expect_rounded<T>(x, bits);
  }
  CHECK_NONE(values);
  CHECK_NONE(back);
  CHECK(nans == 2 * ((int64_t{1} << format.fraction_bits()) - 1));
}

TEST_CASE("Each of the 65,536 numbers of 16 bits is worth what IEEE 754 says, and comes back",
          "[core][sixteen]") {
  check_all_values<Bf16>();
  check_all_values<Fp16>();
}

/// Between each number and the next one: the middle, and the float32s on both sides of it. After
/// the largest comes what would be the next one, and rounds to infinity.
template <class T>
void check_midpoints() {
  const Format format = format_of<T>();
  INFO(format.name);
  Faults middle, below, above;
  for (uint32_t size = 0; size < format.infinity; ++size) {
    const double low = format.value(uint16_t(size));
    const double step = size + 1 < format.infinity ? format.value(uint16_t(size + 1)) - low
                                                   : low - format.value(uint16_t(size - 1));
    for (const uint32_t sign : {0x0000u, 0x8000u}) {
      const auto x = float((sign != 0 ? -1 : 1) * (low + step / 2));
      middle.expect(std::abs(double(x)) == low + step / 2, x, size, size);  // no rounding before
      middle.expect_rounded<T>(x, sign | (size % 2 == 0 ? size : size + 1));
      below.expect_rounded<T>(std::nextafter(x, 0.0f), sign | size);
      above.expect_rounded<T>(std::nextafter(x, sign != 0 ? -kFloatInfinity : kFloatInfinity),
                              sign | (size + 1));
    }
  }
  CHECK_NONE(middle);
  CHECK_NONE(below);
  CHECK_NONE(above);
}

TEST_CASE("A float32 becomes the nearest number of 16 bits, in the middle the even one",
          "[core][sixteen]") {
  check_midpoints<Bf16>();
  check_midpoints<Fp16>();
}

TEST_CASE("What is too large becomes infinity, what is too small zero, each with its sign",
          "[core][sixteen]") {
  for (const float x : {kFloatInfinity, std::numeric_limits<float>::max(), 65520.0f, 1e30F}) {
    INFO(x);
    CHECK(Fp16(x).bits == 0x7c00);
    CHECK(Fp16(-x).bits == 0xfc00);
  }
  CHECK(Bf16(kFloatInfinity).bits == 0x7f80);
  CHECK(Bf16(std::numeric_limits<float>::max()).bits == 0x7f80);
  CHECK(Bf16(-std::numeric_limits<float>::max()).bits == 0xff80);
  const float smallest = std::numeric_limits<float>::denorm_min();
  for (const float x : {0.0f, smallest, 0x1p-134F}) {
    INFO(x);
    CHECK(Bf16(x).bits == 0x0000);
    CHECK(Bf16(-x).bits == 0x8000);
    CHECK(Fp16(x).bits == 0x0000);
    CHECK(Fp16(-x).bits == 0x8000);
  }
  CHECK(Fp16(0x1p-25F).bits == 0x0000);
  CHECK(Fp16(0x1.8p-25F).bits == 0x0001);
}

TEST_CASE("No NaN becomes a number or infinity", "[core][sixteen]") {
  Faults bf16, fp16;
  for (const uint32_t sign : {0x00000000u, 0x80000000u}) {
    for (uint32_t fraction = 1; fraction <= 0x007fffff; fraction += fraction < 0x20000 ? 1 : 9973) {
      const auto x = std::bit_cast<float>(sign | 0x7f800000u | fraction);
      bf16.expect_rounded<Bf16>(x, 0x7fc0);
      fp16.expect_rounded<Fp16>(x, sign >> 16 | 0x7e00);
    }
  }
  CHECK_NONE(bf16);
  CHECK_NONE(fp16);
}

/// By Python 3.11, struct.pack("<e", x), and for bf16 by hand.
TEST_CASE("Numbers that one meets become what others make of them", "[core][sixteen]") {
  struct Golden {
    float x;
    uint16_t bf16, fp16;
  };
  for (const Golden& golden : std::vector<Golden>{{1, 0x3f80, 0x3c00},
                                                  {-2, 0xc000, 0xc000},
                                                  {0.1F, 0x3dcd, 0x2e66},
                                                  {1 / 3.0F, 0x3eab, 0x3555},
                                                  {3.14159265F, 0x4049, 0x4248},
                                                  {65504, 0x4780, 0x7bff},
                                                  {1e-8F, 0x322c, 0x0000},
                                                  {6e-8F, 0x3381, 0x0001},
                                                  {2049, 0x4500, 0x6800},
                                                  {2051, 0x4500, 0x6802}}) {
    INFO(golden.x);
    CHECK(Bf16(golden.x).bits == golden.bf16);
    CHECK(Fp16(golden.x).bits == golden.fp16);
  }
}

}  // namespace
}  // namespace lockstep
