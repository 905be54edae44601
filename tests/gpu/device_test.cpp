// GPUs: their memory, page-locked memory and the feeder, which GPU, and how precisely it computes.

#include <cstdlib>

#include "common/data/synthetic.h"
#include "common/kernels/cuda/cuda.h"
#include "common/training/feeder.h"
#include "tests/gpu/busy_gpu.h"
#include "tests/gpu/gpu_test_support.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using namespace testing::gpu;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using testing::message_of;
using testing::random_values;
using testing::ScopedEnvironment;
using Values = std::vector<Real>;

// --- Kernels -------------------------------------------------------------------------------------

TEST_CASE("A GPU is asked once how many blocks of a kernel it runs side by side",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  if (!testing::is_model(*gpu.device)) {
    LOCKSTEP_SKIP("not the CUDA model: a real GPU fails when it wants");
  }
  const Stream other = gpu.device->create_stream("other");
  const Tensor x = gpu.filled({100'003}, 1), y = Tensor::from_host(other, {5}, Values(5, 1));
  const ScopedEnvironment fault(  // of the second question
      "CUDA_MODEL_FAULT", "cudaOccupancyMaxActiveBlocksPerMultiprocessor:1:2");
  for (int i = 0; i < 3; ++i) {
    gpu.kernels().scale(gpu.stream, 2, x);
    gpu.kernels().scale(other, 2, y);
  }
  CHECK(x.to_host() == Values(100'003, 8));
  CHECK(y.to_host() == Values(5, 8));
  gpu.kernels().add(gpu.stream, x, x);  // another kernel
  CHECK_THAT(message_of<DeviceError>([&] { gpu.stream.synchronize(); }),
             ContainsSubstring("cudaOccupancyMaxActiveBlocksPerMultiprocessor: "));
}

TEST_CASE("A kernel of which few blocks run side by side computes the same", "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const ScopedEnvironment few("CUDA_MODEL_SIDE_BY_SIDE", "100");  // not one block
  const Gpu gpu;
  const Tensor x = gpu.filled({100'003}, 1);
  gpu.kernels().scale(gpu.stream, 2, x);
  CHECK(x.to_host() == Values(100'003, 2));
}

// --- Memory --------------------------------------------------------------------------------------

TEST_CASE("GPU memory is counted exactly, from the host's request to its release",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  MemoryCounter& memory = gpu.device->memory();
  const int64_t before = memory.current();
  auto first = std::make_unique<Buffer>(gpu.stream, 1000);
  CHECK(memory.current() == before + 1000);
  {
    const Buffer second(gpu.stream, 500);
    CHECK(memory.current() == before + 1500);
    CHECK(reinterpret_cast<uintptr_t>(second.data()) % 64 == 0);
  }
  CHECK(memory.current() == before + 1000);
  first.reset();
  CHECK(memory.current() == before);
  CHECK(memory.peak() >= before + 1500);
  memory.reset_peak();
  CHECK(memory.peak() == before);
}

TEST_CASE("GPU workspaces are counted, and a second pass needs no more", "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Window2d g = make_window("conv", {4, 14, 14, 16}, 16, 32, 3, 1, 1);
  const Tensor x = gpu.filled(g.input(), 1), y = gpu.filled(g.output(), 1);
  const Tensor weight = gpu.filled(g.weight(), 1), dweight = gpu.filled(g.weight(), 1);
  const Tensor bias = gpu.filled({32}, 1), dbias = gpu.filled({32}, 1);
  const auto pass = [&] {
    gpu.kernels().conv2d(gpu.stream, g, x, weight, bias, y);
    gpu.kernels().conv2d_backward_input(gpu.stream, g, y, weight, x);
    gpu.kernels().conv2d_backward_parameters(gpu.stream, g, x, y, dweight, dbias);
    gpu.kernels().batch_norm_statistics(gpu.stream, x, gpu.filled({33}, 0));
    gpu.stream.synchronize();
  };
  MemoryCounter& memory = gpu.device->memory();
  const int64_t tensors = memory.current();
  pass();
  const int64_t current = memory.current(), peak = memory.peak();
  CHECK(current >= tensors);
  for (int i = 0; i < 3; ++i) pass();
  CHECK(memory.current() == current);
  CHECK(memory.peak() == peak);
}

TEST_CASE("GPU memory that is freed stays whole for what was enqueued before", "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Busy busy(gpu.stream, 2);
  const Shape shape{300000};
  int right = 0;
  for (int i = 0; i < 20; ++i) {
    const Tensor sum = Tensor::empty(gpu.stream, shape);
    gpu.kernels().fill(gpu.stream, 0, sum);
    busy.enqueue();
    for (const Real value : {Real(1), Real(i)}) {  // the second may get the first one's memory
      const Tensor part = Tensor::empty(gpu.stream, shape);
      gpu.kernels().fill(gpu.stream, value, part);
      gpu.kernels().add(gpu.stream, part, sum);
    }
    right += sum.to_host() == Values(300000, Real(1 + i));
  }
  CHECK(right == 20);
}

TEST_CASE("Values go to a GPU and back as they were, and from one of its tensors to another",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  for (const int64_t n : {1, 3, 257, 1000003}) {
    const Values values = random_values({n}, 1);
    const Tensor x = gpu.put({n}, values), y = gpu.filled({n}, 0);
    CHECK((x.to_host() == values));
    gpu.stream.copy(y.data(), x.data(), x.bytes());
    CHECK((y.to_host() == values));
  }
  const std::vector<uint8_t> bytes{1, 2, 255};
  CHECK(ByteTensor::from_host(gpu.stream, {3}, bytes).to_host() == bytes);
}

TEST_CASE("More memory than a GPU has is an error with the sizes, and the GPU goes on working",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Buffer present(gpu.stream, size_t{3} << 20);
  const int64_t current = gpu.device->memory().current();
  const std::string error = message_of<DeviceError>([&] { Buffer(gpu.stream, size_t{1} << 40); });
  INFO(error);
  CHECK_THAT(error, StartsWith("cuda:0: "));
  CHECK_THAT(error, ContainsSubstring("no room for 1048576.0 MiB") && ContainsSubstring("free"));
  CHECK(error.find('\n') == error.npos);
  CHECK(gpu.device->memory().current() == current);
  const Tensor y = gpu.filled({1000}, 2);
  gpu.kernels().scale(gpu.stream, 3, y);
  CHECK(y.to_host() == Values(1000, 6));
}

/// Values of cuda:0 go to cuda:1 in a stream of the first, and back in one of the second.
Values there_and_back(const Values& values) {
  const Gpu here;
  const auto device = open_device({DeviceId::Kind::cuda, 1}, {});
  const Stream there = device->create_stream("there");
  const Shape shape{static_cast<int64_t>(values.size())};
  const Tensor x = here.put(shape, values), back = here.filled(shape, 0);
  const Tensor y = Tensor::empty(there, shape);
  here.stream.wait(there.record());
  here.stream.copy(y.data(), x.data(), x.bytes());
  there.wait(here.stream.record());
  there.kernels().scale(there, 2, y);
  there.copy(back.data(), y.data(), y.bytes());
  here.stream.wait(there.record());
  return back.to_host();
}

TEST_CASE("Values go from one GPU to another, whether those reach each other's memory or not",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  if (cuda::availability().devices < 2) LOCKSTEP_SKIP("fewer than two GPUs");
  for (const char* access : {"1", "0"}) {
    INFO("access " << access);
    const ScopedEnvironment peers("CUDA_MODEL_PEER_ACCESS", access);  // what the model has
    for (const int64_t n : {1, 1000003}) {
      Values values = random_values({n}, 1);
      const Values found = there_and_back(values);
      for (Real& value : values) value *= 2;
      CHECK((found == values));
    }
  }
}

TEST_CASE("Only GPUs that are open get access to each other's memory", "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  if (cuda::availability().devices < 2) LOCKSTEP_SKIP("fewer than two GPUs");
  const Gpu gpu;
  if (!testing::is_model(*gpu.device)) {
    LOCKSTEP_SKIP("not the CUDA model: a real GPU fails when it wants");
  }
  const DeviceId other{DeviceId::Kind::cuda, 1};
  const auto call_of_access = [](const std::string& code) {
    return ScopedEnvironment("CUDA_MODEL_FAULT", "cudaMemPoolSetAccess:" + code);
  };
  {
    const auto fault = call_of_access("1");
    CHECK_NOTHROW(Gpu());  // the same one again
  }
  {
    const auto fault = call_of_access("1");
    CHECK_THROWS_AS(open_device(other, {}), DeviceError);
  }
  {
    const auto fault = call_of_access("1:2");  // the way back
    CHECK_THROWS_AS(open_device(other, {}), DeviceError);
  }
  const ScopedEnvironment none("CUDA_MODEL_PEER_ACCESS", "0");
  const auto fault = call_of_access("1");
  CHECK_NOTHROW(open_device(other, {}));
}

// --- Page-locked memory and the feeder -----------------------------------------------------------

TEST_CASE("Copies between a GPU and its host memory return before they are made",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Busy busy(gpu.stream, 100);
  const size_t count = size_t{1} << 20;
  const Pinned source(*gpu.device, count, 5), target(*gpu.device, count, 0);
  const Tensor x = gpu.filled({int64_t{1} << 20}, 0);
  busy.enqueue();
  const Event busy_end = gpu.stream.record();
  gpu.stream.copy(x.data(), source.data(), x.bytes());
  gpu.kernels().scale(gpu.stream, 2, x);
  gpu.stream.copy(target.data(), x.data(), x.bytes());
  CHECK_FALSE(busy_end.done());
  gpu.stream.synchronize();
  CHECK((Values(target.data(), target.data() + count) == Values(count, 10)));
}

TEST_CASE("Page-locked memory is freed without an exception, during a capture and after a failure",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Busy busy(gpu.stream, 50);
  const Tensor x = gpu.filled({1000}, 0);
  const auto make = [&] { return std::make_unique<Pinned>(*gpu.device, 1000, 1); };
  auto memory = make();
  busy.enqueue();
  gpu.stream.copy(x.data(), memory->data(), x.bytes());
  const Event copied = gpu.stream.record();
  gpu.stream.begin_capture();
  memory.reset();  // one that throws ends the process
  CHECK(copied.done());
  gpu.stream.end_capture();
  CHECK(x.to_host() == Values(1000, 1));
  memory = make();
  for (const char* failure : {"cudaSetDevice:46", "cudaFreeHost:1"}) {  // 46: a busy GPU
    const ScopedEnvironment fault("CUDA_MODEL_FAULT", failure);
    memory.reset();
    memory = make();
  }
  gpu.kernels().scale(gpu.stream, 2, x);  // a launch is not blamed for what failed before
  CHECK(x.to_host() == Values(1000, 2));
}

/// Enqueues a copy from page-locked memory after long work, waits for its event or not, and writes
/// the next values into that memory. Returns what arrived.
Values copy_then_overwrite(bool wait, bool& overwritten_before) {
  const Gpu gpu;
  const Busy busy(gpu.stream, 100);
  const Pinned staging(*gpu.device, 100000, 1);
  const Tensor x = gpu.filled({100000}, 0);
  busy.enqueue();
  const Event busy_end = gpu.stream.record();
  gpu.stream.copy(x.data(), staging.data(), x.bytes());
  const Event copied = gpu.stream.record();
  if (wait) copied.synchronize();
  staging.set(2);
  overwritten_before = !busy_end.done();
  return x.to_host();
}

TEST_CASE("Host memory reused before its copy's event brings wrong data, and after it right data",
          "[cuda][device][row30]") {
  LOCKSTEP_NEEDS_GPU();
  bool overwritten_before = false;
  CHECK((copy_then_overwrite(/*wait=*/true, overwritten_before) == Values(100000, 1)));
  CHECK_FALSE(overwritten_before);
  CHECK((copy_then_overwrite(/*wait=*/false, overwritten_before) == Values(100000, 2)));
  CHECK(overwritten_before);
}

/// Sample i as the network takes it.
Values normalized(const Dataset& set, int64_t i) {
  Values values;
  for (int64_t p = i * set.image_bytes(); p < (i + 1) * set.image_bytes(); ++p) {
    values.push_back((Real(set.images[p]) / 255 - Real(set.mean)) / Real(set.stddev));
  }
  return values;
}

TEST_CASE("The feeder keeps a batch in host memory until its slow copy has been made",
          "[cuda][device][row30]") {
  LOCKSTEP_NEEDS_GPU();
  constexpr int64_t kBatch = 32, kSteps = 12;
  const Dataset set = make_synthetic(SyntheticPart::train, kBatch * kSteps);
  const Gpu gpu;
  const Busy busy(gpu.stream, 20);
  Context context(gpu.stream);
  Feeder feeder(gpu.stream, set);
  DataLoader loader(set, {.batch_size = kBatch, .allocator = [&](size_t bytes) {
                            return gpu.device->allocate_host(bytes);
                          }});
  std::vector<Tensor> images;
  std::vector<LabelTensor> labels;
  loader.begin_epoch(0);
  while (std::optional<HostBatch> batch = loader.next()) {
    busy.enqueue();  // the copies come late
    const DeviceBatch& fed = feeder.feed(*batch, context);
    images.push_back(feeder.normalize(fed, context));
    labels.push_back(LabelTensor::empty(gpu.stream, {kBatch}));
    gpu.stream.copy(labels.back().data(), fed.labels.data(), fed.labels.bytes());
  }
  REQUIRE(images.size() == kSteps);
  for (int64_t step = 0; step < kSteps; ++step) {
    const Values found = images[step].to_host();
    const std::vector<int32_t> classes = labels[step].to_host();
    int64_t right = 0;
    for (int64_t i = 0; i < kBatch; ++i) {
      const Values expected = normalized(set, step * kBatch + i);
      right += classes[i] == set.labels[step * kBatch + i] &&
               std::equal(expected.begin(), expected.end(), found.begin() + i * 784);
    }
    INFO("step " << step);
    CHECK(right == kBatch);
  }
}

TEST_CASE("The feeder's staged state is not overwritten before their slow copy",
          "[cuda][device][row30]") {
  LOCKSTEP_NEEDS_GPU();
  constexpr int64_t kParts = 40;  // many more than there are places to stage them
  const Dataset set = make_synthetic(SyntheticPart::train, kParts);
  const Gpu gpu;
  const Busy busy(gpu.stream, 20);
  Context context(gpu.stream);
  Feeder feeder(gpu.stream, set);
  DataLoader loader(set, {.batch_size = kParts, .allocator = [&](size_t bytes) {
                            return gpu.device->allocate_host(bytes);
                          }});
  loader.begin_epoch(0);
  std::optional<HostBatch> batch = loader.next();
  REQUIRE(batch);
  std::vector<Tensor> scores_gradients;
  busy.enqueue();
  for (int64_t i = 0; i < kParts; ++i) {
    context.begin_step({.loss_weight = Real(i + 1)});
    const DeviceBatch& fed = feeder.feed(*batch, {.first = i, .count = 1}, context);
    scores_gradients.push_back(Tensor::empty(gpu.stream, {1, 10}));
    gpu.kernels().nll_loss_backward(gpu.stream, context.state(), fed.labels,
                                    scores_gradients.back());
  }
  feeder.retire(std::move(*batch));
  for (int64_t i = 0; i < kParts; ++i) {
    Values expected(10, 0);
    expected[set.labels[i]] = -Real(i + 1);
    CHECK(scores_gradients[i].to_host() == expected);
  }
}

// --- Devices -------------------------------------------------------------------------------------

TEST_CASE("A GPU that is not there is an error with their number and CUDA_VISIBLE_DEVICES",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const char* set = std::getenv("CUDA_VISIBLE_DEVICES");
  const std::string visible = set == nullptr ? "0" : set;
  const ScopedEnvironment environment("CUDA_VISIBLE_DEVICES", visible);
  const DeviceId absent{DeviceId::Kind::cuda, 99};
  const std::string error = message_of<EnvironmentError>([&] { open_device(absent, {}); });
  INFO(error);
  CHECK_THAT(error, StartsWith("cuda:99: "));
  const int gpus = cuda::availability().devices;
  CHECK_THAT(error, ContainsSubstring(fmt::format("found {} GPU", gpus)));
  CHECK_THAT(error, ContainsSubstring("CUDA_VISIBLE_DEVICES is '" + visible + "'"));
  CHECK(error.find('\n') == error.npos);
}

TEST_CASE("Two replicas on one GPU work at the same time, each with its own memory",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu one, two;
  const Buffer buffer(one.stream, 1000);
  CHECK(one.device->memory().current() - two.device->memory().current() == 1000);
  const Window2d g = make_window("conv", {2, 12, 12, 10}, 10, 20, 5, 1, 0);
  const MatMul square{
      .m = 64, .n = 64, .k = 64, .transpose_a = false, .transpose_b = false, .accumulate = false};
  const auto enqueue = [&](const Gpu& gpu, uint32_t seed, const Tensor& y, const Tensor& product) {
    const Tensor x = gpu.put(g.input(), random_values(g.input(), seed));
    const Tensor weight = gpu.put(g.weight(), random_values(g.weight(), seed + 1));
    const Tensor bias = gpu.filled({20}, 0), a = gpu.filled({64, 64}, Real(seed));
    for (int i = 0; i < 20; ++i) {
      gpu.kernels().conv2d(gpu.stream, g, x, weight, bias, y);
      gpu.kernels().matmul(gpu.stream, square, a, a, product);
    }
  };
  const auto both_at_once = [&](bool swap) {
    const Gpu& first = swap ? two : one;
    const Gpu& second = swap ? one : two;
    const Tensor y1 = first.filled(g.output(), 0), p1 = first.filled({64, 64}, 0);
    const Tensor y2 = second.filled(g.output(), 0), p2 = second.filled({64, 64}, 0);
    enqueue(first, 1, y1, p1);
    enqueue(second, 2, y2, p2);
    return std::vector<Values>{y1.to_host(), p1.to_host(), y2.to_host(), p2.to_host()};
  };
  const std::vector<Values> found = both_at_once(false);
  CHECK((both_at_once(true) == found));  // the replicas change places
  CHECK(found[0] != found[2]);
  CHECK(found[1] == Values(64 * 64, 64));
  CHECK(found[3] == Values(64 * 64, 256));
}

TEST_CASE("A GPU says what it is and who computes", "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  CHECK(gpu.device->name() == "cuda:0");
  CHECK_THAT(gpu.device->description(), StartsWith("cuda ("));
  CHECK_THAT(gpu.device->description(), !ContainsSubstring("TF32"));
  CHECK_THAT(gpu.kernels().engine(), ContainsSubstring("cuDNN"));
}

// --- Precision -----------------------------------------------------------------------------------

struct Errors {
  double matmul, conv;  // relative L2 against sums in double
};

Errors errors_of(const Gpu& gpu) {
  const int64_t n = 256, channels = 64;
  const Values a = random_values({n, n}, 1), b = random_values({n, n}, 2);
  std::vector<double> product(n * n), image(channels);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t p = 0; p < n; ++p) {
      for (int64_t j = 0; j < n; ++j) product[i * n + j] += double(a[i * n + p]) * b[p * n + j];
    }
  }
  const Tensor c = gpu.filled({n, n}, 0);
  gpu.kernels().matmul(gpu.stream, {n, n, n, false, false, false}, gpu.put({n, n}, a),
                       gpu.put({n, n}, b), c);
  // A 1x1 convolution of n pixels with 64 channels is a product, too.
  const Window2d g = make_window("conv", {1, 16, 16, channels}, channels, channels, 1, 1, 0);
  const Values x = random_values(g.input(), 3), w = random_values(g.weight(), 4);
  std::vector<double> expected(x.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    for (int64_t k = 0; k < channels; ++k) {
      expected[i] += double(x[i / channels * channels + k]) * w[i % channels * channels + k];
    }
  }
  const Tensor y = gpu.filled(g.output(), 0);
  gpu.kernels().conv2d(gpu.stream, g, gpu.put(g.input(), x), gpu.put(g.weight(), w),
                       gpu.filled({channels}, 0), y);
  const auto error = [](const Tensor& t, const std::vector<double>& exact) {
    const Values found = t.to_host();
    return testing::relative_l2({found.begin(), found.end()}, exact);
  };
  return {error(c, product), error(y, expected)};
}

TEST_CASE("Products are float32 unless TF32 is asked for, and then the GPU says so",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Errors plain = errors_of(Gpu());
  CHECK(plain.matmul <= 1e-6);
  CHECK(plain.conv <= 1e-6);
  try {
    open_device(testing::kGpu, {.tf32 = true});
  } catch (const BadInput& refused) {  // of a GPU before Ampere
    REQUIRE_FALSE(testing::is_model(*Gpu().device));
    LOCKSTEP_SKIP(std::string("no TF32: ") + refused.what());
  }
  const Gpu tf32({.tf32 = true});
  CHECK_THAT(tf32.device->description(), ContainsSubstring("TF32"));
  const Errors rounded = errors_of(tf32);
  CHECK(rounded.matmul <= 1e-2);
  CHECK(rounded.conv <= 1e-2);
  CHECK(rounded.matmul > 1e-5);  // 10 bits of mantissa show
}

}  // namespace
}  // namespace lockstep
