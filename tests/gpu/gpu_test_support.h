#pragma once
// Shared by the tests of the CUDA backend: the same work on cuda:0 and on the CPU's reference
// engine, on tensors that notice a write beside them.

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "common/comm/nccl_communicator.h"
#include "common/core/error.h"
#include "common/kernels/cuda/cuda.h"
#include "common/kernels/devices.h"
#include "tests/support/catch.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tasks.h"

/// Head of every case that needs a GPU.
#define LOCKSTEP_NEEDS_GPU()                                                             \
  do {                                                                                   \
    const std::string no_gpu = ::lockstep::why_no_gpu();                                 \
    if (!no_gpu.empty() && std::getenv("LOCKSTEP_NEEDS_GPU")) FAIL("no GPU: " + no_gpu); \
    if (!no_gpu.empty()) LOCKSTEP_SKIP("no GPU: " + no_gpu);                             \
  } while (false)

/// Head of every case that needs NCCL on so many GPUs.
#define LOCKSTEP_NEEDS_NCCL(count)                                            \
  do {                                                                        \
    LOCKSTEP_NEEDS_GPU();                                                     \
    const std::string missing = ::lockstep::testing::without_nccl(count);     \
    if (!missing.empty() && std::getenv("LOCKSTEP_NEEDS_GPU")) FAIL(missing); \
    if (!missing.empty()) LOCKSTEP_SKIP(missing);                             \
  } while (false)

namespace lockstep::testing {

constexpr DeviceId kGpu{DeviceId::Kind::cuda, 0};

/// True on the CUDA model, which runs on the CPU: everything works there, slowly.
inline bool is_model(const Device& device) {
  return device.description().find("CUDA model") != std::string::npos;
}

/// How often this thread has called a function of the model, as the model counts; "kernel": how
/// many kernels of ours it has started.
inline long calls_of(const char* function) {
  using Count = long(const char*);
  static void* const runtime = dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD);
  static auto* const count = reinterpret_cast<Count*>(dlsym(runtime, "cuda_model_calls"));
  return count(function);
}

/// Whether to try everything: on the model, which is far slower than a GPU, only with --full.
inline bool thorough() { return full_campaign() || !is_model(*open_device(kGpu, {})); }

/// Keeps a stream busy for at least this long: passes over memory.
inline void occupy(Stream stream, double seconds) {
  const Tensor x = Tensor::empty(stream, {int64_t{1} << (is_model(stream.device()) ? 18 : 26)});
  const auto pass = [&] { stream.kernels().fill(stream, 1, x); };
  pass();  // and loads the kernel
  stream.synchronize();
  double shortest = kLong;
  for (int i = 0; i < 4; ++i) {
    const auto begin = Clock::now();
    pass();
    stream.synchronize();
    shortest = std::min(shortest, seconds_since(begin));
  }
  for (double enqueued = 0; enqueued < seconds; enqueued += shortest) pass();
}

/// Why there are not `count` GPUs with NCCL; empty if there are.
inline std::string without_nccl(int count) {
  if (cuda::availability().devices < count) return "fewer than two GPUs";
  const std::string reason = nccl_availability();
  return reason.empty() ? "" : "fewer than two GPUs that NCCL serves: " + reason;
}

/// |found - expected| / |expected|; positions that are equal, NaN and NaN included, count nothing.
inline double relative_l2(const std::vector<double>& found, const std::vector<double>& expected) {
  if (found.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double apart = 0, length = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const bool both_nan = std::isnan(found[i]) && std::isnan(expected[i]);
    if (both_nan || found[i] == expected[i]) {
      if (std::isfinite(expected[i])) length += expected[i] * expected[i];
      continue;
    }
    const double d = found[i] - expected[i];
    if (!std::isfinite(d)) return std::numeric_limits<double>::infinity();
    apart += d * d;
    length += expected[i] * expected[i];
  }
  return apart == 0 ? 0 : std::sqrt(apart / length);
}

/// The result of an operation, every type as double: all numbers of the tests are exact in it.
struct Result {
  std::string name;
  std::vector<double> values;
  double tolerance;  // relative L2 between CUDA and the CPU; 0: equal
};

/// One execution of some operations on one device. Its tensors are inside larger buffers, in which
/// nothing may change; `shift` moves their first element off every alignment.
class Run {
 public:
  Run(Stream stream, int64_t shift) : stream(stream), ops(stream.kernels()), shift_(shift) {}

  const Stream stream;
  Kernels& ops;

  template <class T>
  BasicTensor<T> put(const Shape& shape, const std::vector<T>& values) {
    const int64_t before = kMargin + shift_, count = shape.elements();
    std::vector<T> all(static_cast<size_t>(before + count + kMargin), margin<T>());
    std::copy(values.begin(), values.end(), all.begin() + before);
    const auto whole = BasicTensor<T>::from_host(stream, {static_cast<int64_t>(all.size())}, all);
    margins_.push_back([=] {
      const std::vector<T> now = whole.to_host();
      const auto same = [&](int64_t i) { return std::memcmp(&now[i], &all[i], sizeof(T)) == 0; };
      for (int64_t i = 0; i < before; ++i) {
        if (!same(i)) return false;
      }
      for (int64_t i = before + count; i < static_cast<int64_t>(now.size()); ++i) {
        if (!same(i)) return false;
      }
      return true;
    });
    return whole.range(before, shape);
  }
  Tensor random(const Shape& shape, uint32_t seed) {
    return put(shape, random_values(shape, seed));
  }
  /// NaN everywhere: elements that an operation does not overwrite, or reads before writing, show.
  Tensor output(const Shape& shape) {
    return filled(shape, std::numeric_limits<Real>::quiet_NaN());
  }
  Tensor filled(const Shape& shape, Real value) {
    return put(shape, std::vector<Real>(static_cast<size_t>(shape.elements()), value));
  }
  LabelTensor labels(const std::vector<int32_t>& values) {
    return put({static_cast<int64_t>(values.size())}, values);
  }
  StepStateTensor state(const StepState& step) { return put<StepState>({}, {step}); }
  /// n numbers of three parameters, the second without a gradient.
  Owners owners(int64_t n) {
    return {put<Stretch>({3}, {{n / 2, 2}, {n / 2 + n / 4, 1}, {n, 0}}), put<Real>({3}, {1, 0, 1})};
  }
  HealthTensor health(int64_t failed_step) { return put<Health>({}, {Health{failed_step}}); }

  template <class T>
  void result(std::string name, const BasicTensor<T>& tensor, double tolerance) {
    const std::vector<T> found = tensor.to_host();
    results_.push_back({std::move(name), {found.begin(), found.end()}, tolerance});
  }
  void result(const HealthTensor& health) {
    const Health h = health.to_host()[0];
    results_.push_back({"health",
                        {double(h.failed_step), double(h.scale), double(h.good_steps),
                         double(h.skipped_step), double(h.skipped)},
                        0});
  }

  const std::vector<Result>& results() const { return results_; }
  bool margins_are_intact() const {
    return std::all_of(margins_.begin(), margins_.end(),
                       [](const auto& intact) { return intact(); });
  }

 private:
  static constexpr int64_t kMargin = 64;  // elements: tensors keep an alignment of 64 bytes

  template <class T>
  static T margin() {
    T value;
    std::memset(static_cast<void*>(&value), 0x5A, sizeof value);
    return value;
  }

  int64_t shift_;
  std::vector<std::function<bool()>> margins_;
  std::vector<Result> results_;
};

/// cuda:0 and the CPU's reference engine, with a stream on each.
struct Both {
  using Work = std::function<void(Run&)>;

  DeviceOptions options{};  // of the GPU
  std::unique_ptr<Device> gpu_device = open_device(kGpu, options);
  std::unique_ptr<Device> cpu_device = cpu::open_cpu_device(0, {}, cpu::EngineKind::reference);
  Stream gpu = gpu_device->create_stream("gpu"), cpu = cpu_device->create_stream("cpu");

  /// Runs `work` on the CPU once and on the GPU twice: the results must agree within their
  /// tolerances, and the two on the GPU bit by bit.
  void agree(const Work& work, int64_t shift = 0) const {
    const std::vector<Result> expected = execute(cpu, work, 0);
    const std::vector<Result> found = execute(gpu, work, shift);
    const std::vector<Result> again = execute(gpu, work, shift);
    REQUIRE(!expected.empty());
    REQUIRE(found.size() == expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      INFO(expected[i].name << ", " << expected[i].values.size() << " elements");
      CHECK(relative_l2(found[i].values, expected[i].values) <= expected[i].tolerance);
      CHECK(same_bits(found[i].values, again[i].values));
    }
  }

 private:
  static std::vector<Result> execute(Stream stream, const Work& work, int64_t shift) {
    Run run(stream, shift);
    work(run);
    CHECK(run.margins_are_intact());
    return run.results();
  }
  static bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
    if (a.size() != b.size()) return false;
    return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
  }
};

}  // namespace lockstep::testing
