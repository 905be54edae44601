#pragma once
// TF32: what tensor cores keep of a float, 10 bits of mantissa.

#include <cstdint>
#include <cstring>

namespace cuda_model {

/// `x` rounded to TF32, ties away from zero.
inline float to_tf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if ((bits & 0x7f800000u) == 0x7f800000u) return x;  // infinity, NaN
  bits = (bits + 0x1000u) & ~0x1fffu;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}

}  // namespace cuda_model
