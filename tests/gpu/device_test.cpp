// Streams, events, memory and traces of a GPU: what the tests of streams_test.cpp and core_test.cpp
// show for CPU devices, as far as the host can see it.

#include <chrono>
#include <cstdlib>

#include "common/core/stream_backend.h"
#include "common/data/synthetic.h"
#include "common/kernels/cuda/cuda.h"
#include "common/step/feeder.h"
#include "tests/gpu/gpu_test_support.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using testing::is_model;
using testing::kGpu;
using testing::message_of;
using testing::random_values;
using testing::ScopedEnvironment;
using Clock = std::chrono::steady_clock;
using Values = std::vector<Real>;

/// A GPU with one stream, and short ways to fill tensors.
struct Gpu {
  explicit Gpu(const DeviceOptions& options = {}) : device(open_device(kGpu, options)) {}

  Kernels& kernels() const { return device->kernels(); }
  Tensor put(const Shape& shape, const Values& values) const {
    return Tensor::from_host(stream, shape, values);
  }
  Tensor filled(const Shape& shape, Real value) const {
    return put(shape, Values(static_cast<size_t>(shape.elements()), value));
  }

  std::unique_ptr<Device> device;
  Stream stream = device->create_stream("test");
};

int64_t now_ns() {
  const auto since = Clock::now().time_since_epoch();
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

// --- Order ---------------------------------------------------------------------------------------

TEST_CASE("A GPU is known by its UUID, which no other one has", "[cuda][row123]") {
  LOCKSTEP_NEEDS_GPU();
  const std::string uuid = open_device(kGpu, {})->hardware();
  CHECK(uuid.size() == std::string("GPU-01234567-0123-0123-0123-0123456789ab").size());
  CHECK_THAT(uuid, StartsWith("GPU-"));
  if (cuda::availability().devices > 1) {
    CHECK(open_device({DeviceId::Kind::cuda, 1}, {})->hardware() != uuid);
  }
}

TEST_CASE("A GPU stream runs its operations in the order in which they were enqueued",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Shape shape{1000};
  const Tensor y = gpu.filled(shape, 0), one = gpu.filled(shape, 1);
  for (int i = 0; i < 20; ++i) {  // y = 2 (y + 1)
    gpu.kernels().add(gpu.stream, one, y);
    gpu.kernels().scale(gpu.stream, 2, y);
  }
  CHECK(y.to_host() == Values(1000, Real((1 << 21) - 2)));
}

TEST_CASE("What follows a wait on another GPU stream starts after the event", "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Stream producer = gpu.stream, consumer = gpu.device->create_stream("consumer");
  const Busy busy(producer, 20);
  const Shape shape{70001};
  const Tensor x = gpu.filled(shape, -1);
  int right = 0, still_running = 0;
  for (int i = 0; i < 20; ++i) {
    const Tensor y = Tensor::empty(consumer, shape);
    gpu.kernels().fill(consumer, 0, y);
    busy.enqueue();
    gpu.kernels().fill(producer, Real(i), x);
    const Event filled = producer.record();
    consumer.wait(filled);
    gpu.kernels().add(consumer, x, y);
    still_running += !filled.done();
    producer.wait(consumer.record());
    right += y.to_host() == Values(70001, Real(i));
  }
  CHECK(right == 20);
  CHECK(still_running >= 10);  // so it was the wait that made the results right
}

TEST_CASE("Without a wait another GPU stream does not wait", "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Stream other = gpu.device->create_stream("other");
  const Busy busy(gpu.stream, 100);
  const Tensor y = Tensor::empty(other, {1000});
  busy.enqueue();
  const Event end = gpu.stream.record();
  gpu.kernels().fill(other, 3, y);
  CHECK(y.to_host() == Values(1000, 3));
  CHECK_FALSE(end.done());
  end.synchronize();
  CHECK(end.done());
}

TEST_CASE("A GPU's event is done when what stands before it has run, and knows the past",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Busy busy(gpu.stream, 100);
  const Event first = gpu.stream.record();
  gpu.stream.synchronize();
  CHECK(first.done());
  busy.enqueue();
  const Event behind = gpu.stream.record();
  CHECK(first.done());
  CHECK_FALSE(behind.done());
  behind.synchronize();
  CHECK(behind.done());
  busy.enqueue();
  for (int i = 0; i < 3000; ++i) gpu.stream.record();  // more events than any ring holds
  const Event last = gpu.stream.record();
  CHECK(first.done());
  CHECK(behind.done());
  last.synchronize();
  CHECK(last.done());
}

TEST_CASE("Times between a GPU's events are real, however many others its stream records",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Busy busy(gpu.stream, 20);
  const TimedEvent first = gpu.stream.record_time();
  busy.enqueue();
  const TimedEvent second = gpu.stream.record_time();
  for (int i = 0; i < 3000; ++i) gpu.stream.record();
  CHECK(second.seconds_since(first) > 1e-5);
  CHECK(second.seconds_since(second) == 0);
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

// --- Page-locked memory and the feeder -----------------------------------------------------------

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

/// Enqueues a copy from page-locked memory behind long work, waits for its event or not, and writes
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

// --- Host tasks ----------------------------------------------------------------------------------

TEST_CASE("A host task runs behind what its GPU stream has to do before, and before what comes",
          "[cuda][device][hosttask]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Busy busy(gpu.stream, 50);
  const Pinned staging(*gpu.device, 1000, 0);
  const Tensor x = gpu.filled({1000}, 0);
  busy.enqueue();
  gpu.kernels().fill(gpu.stream, 4, x);
  gpu.stream.copy(staging.data(), x.data(), x.bytes());
  gpu.stream.backend().host_task("square", [data = staging.data()] {
    for (int i = 0; i < 1000; ++i) data[i] *= data[i];
  });
  const Event squared = gpu.stream.record();
  gpu.stream.copy(x.data(), staging.data(), x.bytes());
  gpu.kernels().scale(gpu.stream, 2, x);
  CHECK_FALSE(squared.done());  // the host went on
  CHECK(x.to_host() == Values(1000, 32));
}

TEST_CASE("A host task holds what it captured until it has run, and no longer",
          "[cuda][device][hosttask]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const auto held = std::make_shared<int>(0);
  for (int i = 0; i < 100; ++i) {
    gpu.stream.backend().host_task("count", [held] { ++*held; });
  }
  gpu.stream.synchronize();
  CHECK(*held == 100);
  CHECK(held.use_count() == 1);
}

TEST_CASE("An exception of a host task comes up on every stream of the GPU, behind any copy",
          "[cuda][device][hosttask]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Stream other = gpu.device->create_stream("other");
  const Pinned staging(*gpu.device, 1000, 1);
  const Tensor x = gpu.filled({1000}, 0);
  const auto host_task = [&](std::function<void()> body) {
    gpu.stream.backend().host_task("task", std::move(body));
  };
  bool ran = false;
  const Busy busy(gpu.stream, 50);
  busy.enqueue();  // the host is through before it comes to that
  host_task([] { fail<PeerLost>("rank 1 is gone"); });
  gpu.stream.copy(x.data(), staging.data(), x.bytes());
  host_task([&] { ran = true; });
  other.wait(gpu.stream.record());
  CHECK(message_of<PeerLost>([&] { other.synchronize(); }) == "rank 1 is gone");
  CHECK(message_of<PeerLost>([&] { gpu.stream.synchronize(); }) == "rank 1 is gone");
  CHECK(message_of<PeerLost>([&] { x.to_host(); }) == "rank 1 is gone");
  CHECK_FALSE(ran);
  host_task([] { fail<BadInput>("the first error is the one to report"); });
  CHECK(message_of<PeerLost>([&] { gpu.stream.synchronize(); }) == "rank 1 is gone");
  const Gpu anew;  // the GPU itself is as it was
  CHECK(anew.filled({10}, 3).to_host() == Values(10, 3));
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
  const Gpu tf32({.tf32 = true});
  CHECK_THAT(tf32.device->description(), ContainsSubstring("TF32"));
  const Errors rounded = errors_of(tf32);
  CHECK(rounded.matmul <= 1e-2);
  CHECK(rounded.conv <= 1e-2);
  CHECK(rounded.matmul > 1e-5);  // 10 bits of mantissa show
}

// --- Trace ---------------------------------------------------------------------------------------

using Names = std::vector<std::pair<std::string, std::string>>;  // operation, layer

/// Work with scopes inside each other, and outside any.
void enqueue_traced(Stream stream, const Tensor& x, const Tensor& y) {
  Kernels& kernels = stream.kernels();
  kernels.fill(stream, 1, x);
  {
    const ScopedRange outer(stream, "block1");
    kernels.relu(stream, x, y);
    {
      const ScopedRange inner(stream, "block1.conv1");
      const Window2d g = make_window("conv", {1, 8, 8, 4}, 4, 4, 1, 1, 0);
      kernels.conv2d(stream, g, x, y, y, y.range(128, g.output()));
      kernels.matmul(stream, {4, 4, 4, false, false, false}, x, x, y);
    }
    kernels.add(stream, x, y);
  }
  kernels.batch_norm_statistics(stream, x.range(0, {64, 4}), y);
  stream.backend().host_task("all_reduce", [] {});
}

Names names_of(const std::vector<Span>& spans) {
  Names names;
  for (const Span& span : spans) names.emplace_back(span.op, span.scope ? *span.scope : "");
  return names;
}

TEST_CASE("A GPU's trace has a span per operation, named, in order and one after another",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu({.trace = true});
  const Tensor x = Tensor::empty(gpu.stream, {1024}), y = Tensor::empty(gpu.stream, {1024});
  const int64_t begin = now_ns();
  enqueue_traced(gpu.stream, x, y);
  gpu.stream.synchronize();
  const int64_t end = now_ns();
  std::vector<Span> spans = gpu.stream.backend().timeline();
  // Where cuDNN cannot add the bias itself, an operation of its own does.
  std::erase_if(spans, [](const Span& span) { return span.op == std::string("add_bias"); });
  const Names expected{{"fill", ""},
                       {"relu", "block1"},
                       {"conv2d", "block1.conv1"},
                       {"matmul", "block1.conv1"},
                       {"add", "block1"},
                       {"batch_norm_statistics", ""},
                       {"all_reduce", ""}};
  CHECK(names_of(spans) == expected);
  constexpr int64_t kClocks = 10'000'000;  // ns by which the clocks of host and device may disagree
  for (size_t i = 0; i < spans.size(); ++i) {
    INFO(spans[i].op);
    CHECK(spans[i].begin_ns <= spans[i].end_ns);
    if (i > 0) CHECK(spans[i - 1].end_ns <= spans[i].begin_ns);
    CHECK(spans[i].begin_ns >= begin - kClocks);
    CHECK(spans[i].end_ns <= end + kClocks);
  }
}

TEST_CASE("A GPU that is not traced keeps no spans", "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  gpu.kernels().fill(gpu.stream, 1, Tensor::empty(gpu.stream, {1024}));
  gpu.stream.synchronize();
  CHECK(gpu.stream.backend().timeline().empty());
}

// --- Graphs --------------------------------------------------------------------------------------

TEST_CASE("A captured graph runs when it is launched, every time with what memory then holds",
          "[cuda][device][graph][row126]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Tensor x = gpu.filled({1000}, 1), y = gpu.filled({1000}, 0);
  const Pinned out(*gpu.device, 1000, 0);
  gpu.kernels().add(gpu.stream, x, y);
  gpu.stream.begin_capture();
  gpu.kernels().add(gpu.stream, x, y);
  gpu.kernels().scale(gpu.stream, 2, y);
  gpu.stream.copy(out.data(), y.data(), y.bytes());
  const std::unique_ptr<Graph> graph = gpu.stream.end_capture();
  CHECK(y.to_host() == Values(1000, 1));  // recorded, not run
  for (int i = 0; i < 3; ++i) gpu.stream.launch(*graph);
  gpu.stream.synchronize();
  CHECK(Values(out.data(), out.data() + 1000) == Values(1000, 22));  // ((1 + 1) 2 + 1) 2 ...
  x.copy_from_host(Values(1000, -22));
  gpu.stream.launch(*graph);
  CHECK(y.to_host() == Values(1000, 0));
}

TEST_CASE("A graph keeps the scratch memory that it was captured with",
          "[cuda][device][graph][row126]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Shape shape{70001, 3};  // rows enough for several blocks, whose sums meet in scratch memory
  const Tensor x = gpu.put(shape, random_values(shape, 1)), found = gpu.filled({7}, 0);
  gpu.stream.begin_capture();
  gpu.kernels().batch_norm_statistics(gpu.stream, x, found);
  const std::unique_ptr<Graph> graph = gpu.stream.end_capture();
  const Tensor wide = gpu.filled({2000, 257}, 1), more = gpu.filled({515}, 0);
  gpu.kernels().batch_norm_statistics(gpu.stream, wide, more);  // needs more of it
  std::vector<Tensor> held;  // would get what the first had, were it free
  for (int i = 0; i < 200; ++i) held.push_back(gpu.filled({48}, Real(i)));
  gpu.stream.launch(*graph);
  const Values result = found.to_host();
  for (int i = 0; i < 200; ++i) CHECK(held[i].to_host() == Values(48, Real(i)));
  gpu.kernels().batch_norm_statistics(gpu.stream, x, found);
  CHECK(found.to_host() == result);
}

TEST_CASE("What cannot be part of a graph is refused, and the stream goes on", "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Tensor y = gpu.filled({1000}, 1);
  CHECK_THROWS_AS(gpu.stream.end_capture(), BadInput);
  const Event before = gpu.stream.record();
  const Event elsewhere = gpu.device->create_stream("other").record();
  gpu.stream.begin_capture();
  CHECK_THROWS_AS(gpu.stream.begin_capture(), BadInput);
  CHECK_THROWS_AS(gpu.stream.record(), BadInput);
  CHECK_THROWS_AS(gpu.stream.wait(elsewhere), BadInput);
  CHECK_THROWS_AS(gpu.stream.backend().host_task("task", [] {}), BadInput);
  gpu.kernels().scale(gpu.stream, 2, y);
  const std::unique_ptr<Graph> graph = gpu.stream.end_capture();
  gpu.stream.launch(*graph);
  CHECK(y.to_host() == Values(1000, 2));
  CHECK(before.done());
}

}  // namespace
}  // namespace lockstep
