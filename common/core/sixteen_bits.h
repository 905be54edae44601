#pragma once
// Numbers of 16 bits: half of a float32's bytes, in files and messages.
//
//             sign  exponent  fraction   largest   smallest normal   decimal digits
//   float32    1       8         23      3.4e38        1.2e-38            7.2
//   bf16       1       8          7      3.4e38        1.2e-38            2.4
//   fp16       1       5         10      65504         6.1e-5             3.3
//
// bf16 is the upper half of a float32: the same range, with few digits. fp16 has more digits, in a
// range that gradients leave. Both become a float32 exactly. A float32 is rounded to the nearest
// number; halfway between two, to the one whose last bit is 0; beyond the largest, to infinity.
// PyTorch's BFloat16 and Half round the same, bit for bit (c10/util/BFloat16.h and Half.h).

#include <cstdint>
#include <cstring>

#include "common/core/body.h"

namespace lockstep {

namespace sixteen_bits {

LOCKSTEP_BODY uint32_t bits_of(float x) {
  uint32_t bits;  // NOLINT(cppcoreguidelines-init-variables): the next line fills it
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

LOCKSTEP_BODY float float_of(uint32_t bits) {
  float x;  // NOLINT(cppcoreguidelines-init-variables): the next line fills it
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr uint32_t kSign = 0x80000000, kInfinity = 0x7f800000;  // of a float32

/// `bits` without the last `count` of them, rounded to nearest even. A carry out of the fraction
/// goes into the exponent: this gives the next number, and infinity after the largest.
LOCKSTEP_BODY uint32_t without_last(int count, uint32_t bits) {
  const uint32_t odd = bits >> count & 1, just_below_half = (1u << (count - 1)) - 1;
  return (bits + just_below_half + odd) >> count;
}

LOCKSTEP_BODY uint16_t to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  const bool is_nan = (bits & ~kSign) > kInfinity;  // rounded, it could become infinity
  return uint16_t(is_nan ? 0x7fc0 : without_last(16, bits));
}

/// The exponents of a float32 begin this much lower than those of fp16.
constexpr uint32_t kExponentsBelow = (127 - 15) << 23;

LOCKSTEP_BODY uint16_t to_fp16(float x) {
  const uint32_t sign = bits_of(x) & kSign, size = bits_of(x) & ~kSign;
  constexpr uint32_t kNormal = 0x38800000, kTooLarge = 0x477ff000;  // 2^-14 and 65520
  // Below 2^-14 fp16 is a number of units of 2^-24. Those are also the last bits of a float32 from
  // 0.5 to 1, so that an addition rounds to them.
  const uint32_t units = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
  uint32_t rounded = size < kNormal ? units : without_last(13, size - kExponentsBelow);
  rounded = size < kTooLarge ? rounded : 0x7c00;  // infinity: 65520 is as near to 65504 as to 65536
  rounded = size > kInfinity ? 0x7e00 : rounded;  // NaN
  return uint16_t(sign >> 16 | rounded);
}

LOCKSTEP_BODY float from_fp16(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, size = uint32_t(bits & 0x7fff);
  const uint32_t subnormal = bits_of(float(size) * 0x1p-24f);
  const uint32_t normal = (size << 13) + kExponentsBelow;
  const uint32_t finite = size < 0x0400 ? subnormal : normal;
  return float_of(sign | (size < 0x7c00 ? finite : kInfinity | size << 13));
}

}  // namespace sixteen_bits

// Widening is exact and implicit. Rounding needs an assignment or an explicit constructor. An
// assignment writes the bits, since g++ vectorises no loop that copies a struct.

struct Bf16 {
  uint16_t bits;

  Bf16() = default;
  LOCKSTEP_BODY explicit Bf16(float x) : bits(sixteen_bits::to_bf16(x)) {}
  LOCKSTEP_BODY Bf16& operator=(float x) {
    bits = sixteen_bits::to_bf16(x);
    return *this;
  }
  LOCKSTEP_BODY operator float() const { return sixteen_bits::float_of(uint32_t{bits} << 16); }
};

struct Fp16 {
  uint16_t bits;

  Fp16() = default;
  LOCKSTEP_BODY explicit Fp16(float x) : bits(sixteen_bits::to_fp16(x)) {}
  LOCKSTEP_BODY Fp16& operator=(float x) {
    bits = sixteen_bits::to_fp16(x);
    return *this;
  }
  LOCKSTEP_BODY operator float() const { return sixteen_bits::from_fp16(bits); }
};

}  // namespace lockstep
