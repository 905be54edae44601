#pragma once
// Shared by the tests of kernels and layers: one device, reproducible numbers, and how far two
// arrays are apart.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "common/kernels/cpu/cpu_device.h"
#include "common/kernels/kernels.h"

namespace lockstep::testing {

constexpr bool kDouble = sizeof(Real) == 8;

/// The relative difference between what one device and several compute: the order of sums differs.
constexpr double kTolerance = kDouble ? 1e-12 : 1e-5;

/// A CPU device with one stream, and short ways to fill and read its tensors.
struct TestDevice {
  explicit TestDevice(int threads = 1, cpu::EngineKind engine = cpu::EngineKind::best)
      : TestDevice(cpu::open_cpu_device(0, {.threads = threads}, engine)) {}
  explicit TestDevice(std::unique_ptr<Device> opened) : device(std::move(opened)) {}

  Kernels& kernels() const { return stream.kernels(); }
  Tensor put(const Shape& shape, const std::vector<Real>& values) const {
    return Tensor::from_host(stream, shape, values);
  }
  Tensor filled(const Shape& shape, Real value) const {
    return put(shape, std::vector<Real>(static_cast<size_t>(shape.elements()), value));
  }
  LabelTensor labels(const std::vector<int32_t>& values) const {
    return LabelTensor::from_host(stream, {static_cast<int64_t>(values.size())}, values);
  }
  StepStateTensor state(const StepState& step) const {
    return StepStateTensor::from_host(stream, {}, {step});
  }
  /// n numbers of one parameter that has a gradient.
  Owners one_owner(int64_t n) const {
    return {BasicTensor<Stretch>::from_host(stream, {1}, {{.end = n}}), filled({1}, 1)};
  }

  std::unique_ptr<Device> device;
  Stream stream = device->create_stream("test");
};

/// Numbers in [-1, 1) that are exact in both float and double, from a generator that is the same on
/// every machine.
inline std::vector<Real> random_values(const Shape& shape, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<Real> values(static_cast<size_t>(shape.elements()));
  for (Real& value : values) value = Real(generator() >> 8) / Real(8388608) - 1;
  return values;
}

/// The numbers (i - n/2 + 1/2) gap in random order: no two closer than `gap`, none closer to 0 than
/// gap / 2. For functions with kinks at 0 or at ties.
inline std::vector<Real> spread_values(const Shape& shape, Real gap, uint32_t seed) {
  std::vector<Real> values(static_cast<size_t>(shape.elements()));
  const Real middle = Real(shape.elements()) / 2 - Real(0.5);
  for (size_t i = 0; i < values.size(); ++i) values[i] = (Real(i) - middle) * gap;
  std::mt19937 generator(seed);
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[generator() % i]);
  return values;
}

/// The largest difference, relative to the largest expected value; infinite if the sizes differ or
/// anything is not finite.
template <class A, class B>
double relative_error(const std::vector<A>& found, const std::vector<B>& expected) {
  if (found.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double difference = 0, scale = std::numeric_limits<double>::min();
  for (size_t i = 0; i < found.size(); ++i) {
    const double d = std::abs(double(found[i]) - double(expected[i]));
    if (!std::isfinite(d)) return std::numeric_limits<double>::infinity();
    difference = std::max(difference, d);
    scale = std::max(scale, std::abs(double(expected[i])));
  }
  return difference / scale;
}

}  // namespace lockstep::testing
