#pragma once
// CPU devices with either engine, and tensors for them.

#include <memory>
#include <numeric>
#include <vector>

#include "common/core/tensor.h"
#include "common/kernels/cpu/cpu_device.h"
#include "common/kernels/kernels.h"

namespace lockstep::testing::core {

/// A CPU device with one stream.
struct Setup {
  explicit Setup(cpu::EngineKind engine = cpu::EngineKind::best)
      : device(cpu::open_cpu_device(0, {}, engine)), stream(device->create_stream("stream")) {}
  std::unique_ptr<Device> device;
  Stream stream;
};

/// The reference engine, and oneDNN where this build has it.
inline std::vector<cpu::EngineKind> engines() {
  const auto name = [](cpu::EngineKind kind) { return Setup(kind).device->kernels().engine(); };
  if (name(cpu::EngineKind::best) == name(cpu::EngineKind::reference))
    return {cpu::EngineKind::reference};
  return {cpu::EngineKind::reference, cpu::EngineKind::best};
}

/// 0, 1, 2, ...
inline Tensor counting(Stream stream, const Shape& shape) {
  std::vector<Real> values(static_cast<size_t>(shape.elements()));
  std::iota(values.begin(), values.end(), Real(0));
  return Tensor::from_host(stream, shape, values);
}

}  // namespace lockstep::testing::core
