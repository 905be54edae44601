#pragma once
// A GPU with one stream, and work that keeps it busy.

#include <chrono>

#include "common/data/synthetic.h"
#include "tests/gpu/gpu_test_support.h"

namespace lockstep::testing::gpu {

/// A GPU with one stream, and short ways to fill tensors.
struct Gpu {
  explicit Gpu(const DeviceOptions& options = {}) : device(open_device(kGpu, options)) {}

  Kernels& kernels() const { return device->kernels(); }
  Tensor put(const Shape& shape, const std::vector<Real>& values) const {
    return Tensor::from_host(stream, shape, values);
  }
  Tensor filled(const Shape& shape, Real value) const {
    return put(shape, std::vector<Real>(static_cast<size_t>(shape.elements()), value));
  }

  std::unique_ptr<Device> device;
  Stream stream = device->create_stream("test");
};

inline int64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

/// Work that keeps a stream busy for about so many milliseconds, whatever the device: passes over
/// memory. A GPU takes only about a thousand operations ahead of time, so each of them is long.
class Busy {
 public:
  Busy(Stream stream, double milliseconds)
      : stream_(stream),
        memory_(Tensor::empty(stream, {int64_t{1} << (is_model(stream.device()) ? 18 : 26)})) {
    stream_.kernels().fill(stream_, 1, memory_);
    double shortest = time_of_pass();  // and loads the kernel
    for (int i = 0; i < 4; ++i) shortest = std::min(shortest, time_of_pass());
    passes_ = static_cast<int>(std::ceil(milliseconds / shortest));
  }
  void enqueue() const {
    for (int i = 0; i < passes_; ++i) pass();
  }

 private:
  void pass() const { stream_.kernels().scale(stream_, 1, memory_); }
  double time_of_pass() const {
    stream_.synchronize();
    const int64_t begin = now_ns();
    pass();
    stream_.synchronize();
    return double(now_ns() - begin) * 1e-6;
  }

  Stream stream_;
  Tensor memory_;
  int passes_ = 0;
};

/// Host memory for copies that need no staging, as numbers.
struct Pinned {
  Pinned(Device& device, size_t count, Real value)
      : memory(device.allocate_host(count * sizeof(Real))), count(count) {
    set(value);
  }
  void set(Real value) const { std::fill_n(data(), count, value); }
  Real* data() const { return static_cast<Real*>(memory.get()); }

  std::shared_ptr<void> memory;
  size_t count;
};

}  // namespace lockstep::testing::gpu
