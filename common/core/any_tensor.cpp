#include "common/core/any_tensor.h"

#include "common/core/error.h"

namespace lockstep {

void fail_type(const Shape& shape, ElementType found, ElementType expected) {
  fail<BadInput>("a tensor {} has numbers of type {}, expected {}; convert it first", shape.text(),
                 name_of(found), name_of(expected));
}

AnyTensor AnyTensor::empty(Stream stream, const Shape& shape, ElementType type) {
  return with_numbers(type, [&](auto number) -> AnyTensor {
    return BasicTensor<decltype(number)>::empty(stream, shape);
  });
}

AnyTensor AnyTensor::reshaped(const Shape& shape) const {
  return with_numbers(
      type_, [&](auto number) -> AnyTensor { return as<decltype(number)>().reshaped(shape); });
}

AnyTensor AnyTensor::rows(int64_t first, int64_t count) const {
  return with_numbers(
      type_, [&](auto number) -> AnyTensor { return as<decltype(number)>().rows(first, count); });
}

AnyTensor AnyTensor::range(int64_t first, const Shape& shape) const {
  return with_numbers(
      type_, [&](auto number) -> AnyTensor { return as<decltype(number)>().range(first, shape); });
}

std::vector<Real> AnyTensor::to_host() const {
  return with_numbers(type_, [&](auto number) {
    const auto values = as<decltype(number)>().to_host();
    return std::vector<Real>(values.begin(), values.end());
  });
}

}  // namespace lockstep
