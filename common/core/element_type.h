#pragma once
// Types of numbers that a program chooses when it runs.

#include <array>
#include <cstdint>

#include "common/core/real.h"
#include "common/core/sixteen_bits.h"

namespace lockstep {

enum class ElementType { f32, f64, i64, bf16, fp16 };

/// Bytes of one element.
constexpr int64_t size_of(ElementType type) { return std::array{4, 8, 8, 2, 2}[size_t(type)]; }
/// "f32", "f64", "i64", "bf16" or "fp16"
constexpr const char* name_of(ElementType type) {
  return std::array{"f32", "f64", "i64", "bf16", "fp16"}[size_t(type)];
}

template <class T>
constexpr ElementType kTypeOf = T::has_no_element_type;
template <>
inline constexpr ElementType kTypeOf<float> = ElementType::f32;
template <>
inline constexpr ElementType kTypeOf<double> = ElementType::f64;
template <>
inline constexpr ElementType kTypeOf<Bf16> = ElementType::bf16;
template <>
inline constexpr ElementType kTypeOf<Fp16> = ElementType::fp16;

/// Calls work(T()) with the type of a layer's numbers: Real, Bf16 or Fp16. The build of the proofs
/// computes in float64 alone.
template <class Work>
auto with_numbers([[maybe_unused]] ElementType type, Work work) {
#ifndef LOCKSTEP_DOUBLE
  if (type == ElementType::bf16) return work(Bf16());
  if (type == ElementType::fp16) return work(Fp16());
#endif
  return work(Real());
}

/// The same for numbers that have 16 bits in any build.
template <class Work>
auto with_sixteen_bits(ElementType type, Work work) {
  return type == ElementType::fp16 ? work(Fp16()) : work(Bf16());
}

/// The numbers that layers compute, keep for backward and hand on: Real, or numbers of 16 bits.
enum class Precision { real, bf16, fp16 };
constexpr auto words_of(Precision) {
  return std::array{sizeof(Real) == 4 ? "float32" : "float64", "bf16", "fp16"};
}
constexpr ElementType type_of(Precision precision) {
  return std::array{kTypeOf<Real>, ElementType::bf16, ElementType::fp16}[size_t(precision)];
}

}  // namespace lockstep
