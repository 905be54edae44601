#pragma once
// Numbers of 16 bits, written down from IEEE 754 and not as the project under test does it.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace cuda_model {

/// A number with so many bits of fraction: 7 is bf16, 10 is fp16.
template <int kFraction>
struct Sixteen {
  uint16_t bits = 0;

  Sixteen() = default;
  /// Rounds to nearest even, as nearbyint() does.
  explicit Sixteen(float x) {
    const double size = std::fabs(double(x));
    int magnitude = kInfinity;
    if (std::isnan(x)) {
      magnitude = kInfinity | 1 << (kFraction - 1);
    } else if (!std::isinf(x)) {
      const int exponent = size == 0 ? 1 - kBias : std::max(std::ilogb(size), 1 - kBias);
      const int units = int(std::nearbyint(std::ldexp(size, kFraction - exponent)));
      magnitude = std::min(kInfinity, (exponent + kBias - 1) * (1 << kFraction) + units);
    }
    bits = uint16_t(magnitude | (std::signbit(x) ? 0x8000 : 0));
  }
  operator float() const {
    const int magnitude = bits & 0x7fff, exponent = magnitude >> kFraction;
    const int fraction = magnitude - (exponent << kFraction);
    double size = std::ldexp((exponent == 0 ? 0 : 1 << kFraction) + fraction,
                             std::max(exponent, 1) - kBias - kFraction);
    if (magnitude == kInfinity) size = std::numeric_limits<double>::infinity();
    if (magnitude > kInfinity) size = std::numeric_limits<double>::quiet_NaN();
    return float(bits & 0x8000 ? -size : size);
  }

 private:
  static constexpr int kBias = (1 << (14 - kFraction)) - 1;
  static constexpr int kInfinity = ((1 << (15 - kFraction)) - 1) << kFraction;
};

/// The type of a number in memory.
enum class Number { real, bf16, fp16 };

inline float load(Number kind, const void* data, size_t i) {
  if (kind == Number::bf16) return static_cast<const Sixteen<7>*>(data)[i];
  if (kind == Number::fp16) return static_cast<const Sixteen<10>*>(data)[i];
  return static_cast<const float*>(data)[i];
}
inline void store(Number kind, float x, void* data, size_t i) {
  if (kind == Number::bf16) {
    static_cast<Sixteen<7>*>(data)[i] = Sixteen<7>(x);
  } else if (kind == Number::fp16) {
    static_cast<Sixteen<10>*>(data)[i] = Sixteen<10>(x);
  } else {
    static_cast<float*>(data)[i] = x;
  }
}

}  // namespace cuda_model
