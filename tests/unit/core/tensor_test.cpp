// Tensors, their buffers and how these are counted, the pool of tensors; and that a training step,
// once it has run, allocates nothing more.

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "common/core/error.h"
#include "common/core/host.h"
#include "common/core/tensor.h"
#include "common/data/synthetic.h"
#include "common/kernels/cpu/cpu_device.h"
#include "common/kernels/cpu/engine.h"
#include "common/kernels/kernels.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "common/training/feeder.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/process.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using cpu::EngineKind;
using testing::message_of;

/// A CPU device with one stream.
struct Setup {
  explicit Setup(cpu::EngineKind engine = cpu::EngineKind::best)
      : device(cpu::open_cpu_device(0, {}, engine)), stream(device->create_stream("stream")) {}
  std::unique_ptr<Device> device;
  Stream stream;
};

/// The reference engine, and oneDNN where this build has it.
std::vector<cpu::EngineKind> engines() {
  const auto name = [](cpu::EngineKind kind) { return Setup(kind).device->kernels().engine(); };
  if (name(cpu::EngineKind::best) == name(cpu::EngineKind::reference))
    return {cpu::EngineKind::reference};
  return {cpu::EngineKind::reference, cpu::EngineKind::best};
}

/// 0, 1, 2, ...
Tensor counting(Stream stream, const Shape& shape) {
  std::vector<Real> values(static_cast<size_t>(shape.elements()));
  std::iota(values.begin(), values.end(), Real(0));
  return Tensor::from_host(stream, shape, values);
}

}  // namespace

// --- Shapes and tensors --------------------------------------------------------------------------

TEST_CASE("A shape has a text, elements and elements of a row", "[core]") {
  CHECK(Shape{64, 28, 28, 1}.text() == "[64, 28, 28, 1]");
  CHECK(Shape{64, 28, 28, 3}.elements() == 64 * 28 * 28 * 3);
  CHECK(Shape{64, 28, 28, 3}.row_elements() == 28 * 28 * 3);
  CHECK(Shape{0, 28, 28, 3}.row_elements() == 28 * 28 * 3);
  CHECK(Shape{7}.text() == "[7]");
  CHECK(Shape{7}.row_elements() == 1);
  CHECK(Shape{}.text() == "[]");
  CHECK(Shape{}.elements() == 1);
  CHECK(Shape{}.row_elements() == 1);
  CHECK(Shape{0, 5}.elements() == 0);
  CHECK(Shape{2, 3} == Shape(std::vector<int64_t>{2, 3}));
  CHECK_FALSE(Shape{2, 3} == Shape{3, 2});
}

TEST_CASE("A shape that memory cannot have is refused, not counted wrongly", "[core]") {
  constexpr int64_t k2_62 = int64_t{1} << 62;
  for (const Shape& shape : {Shape{k2_62, 2}, Shape{k2_62, 4, 1, 1},
                             Shape{1L << 32, 1L << 32, 1, 1}, Shape{1L << 32, 1L << 29, 8, 1},
                             Shape{0, k2_62, 4}, Shape{-1, -2}, Shape{3, -1}, Shape{-1}}) {
    INFO(shape.text());
    CHECK_THAT(message_of<BadInput>([&] { shape.elements(); }),
               Catch::Matchers::StartsWith("shape " + shape.text() + ": found "));
  }
  CHECK_THROWS_AS((Shape{7, k2_62, 4}.row_elements()), BadInput);
  CHECK(Shape{k2_62, 1}.elements() == k2_62);
  CHECK(Shape{k2_62, 0}.elements() == 0);
  CHECK(Shape{k2_62}.bytes(1) == size_t(k2_62));
  CHECK_THROWS_AS(Shape{k2_62}.bytes(4), BadInput);  // would be 0
  Setup s;
  CHECK_THROWS_AS(Tensor::empty(s.stream, {k2_62}), BadInput);
  CHECK_THROWS_AS(counting(s.stream, {4}).range(INT64_MAX, {2}), BadInput);
  CHECK(Shape(std::vector<int64_t>(1000, 1)).text() ==
        "[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, ... and 990 more]");
}

TEST_CASE("Views of a tensor share its memory", "[core]") {
  Setup s;
  const Tensor whole = counting(s.stream, {4, 3});
  const int64_t in_use = s.device->memory().current();
  const Tensor rows = whole.rows(1, 2), range = whole.range(5, {2, 2});
  const Tensor inner = whole.rows(1, 3).rows(1, 2).range(1, {3});  // offsets add up
  const Tensor reshaped = whole.reshaped({2, 6});
  CHECK(s.device->memory().current() == in_use);
  CHECK(rows.shape() == Shape{2, 3});
  CHECK(reshaped.shape() == Shape{2, 6});
  CHECK(rows.to_host() == std::vector<Real>{3, 4, 5, 6, 7, 8});
  CHECK(range.to_host() == std::vector<Real>{5, 6, 7, 8});
  CHECK(inner.to_host() == std::vector<Real>{7, 8, 9});
  CHECK(whole.rows(4, 0).to_host().empty());

  range.copy_from_host({50, 60, 70, 80});
  CHECK(reshaped.to_host() == std::vector<Real>{0, 1, 2, 3, 4, 50, 60, 70, 80, 9, 10, 11});
}

TEST_CASE("A view keeps the memory alive, and the last one lets it go", "[core]") {
  Setup s;
  Tensor view;
  CHECK_FALSE(view.defined());
  {
    const Tensor whole = counting(s.stream, {4, 3});
    view = whole.rows(3, 1);
  }
  CHECK(view.to_host() == std::vector<Real>{9, 10, 11});
  CHECK(s.device->memory().current() == static_cast<int64_t>(12 * sizeof(Real)));
  view = Tensor();
  CHECK(s.device->memory().current() == 0);
}

TEST_CASE("A view that does not fit is refused with both shapes", "[core]") {
  Setup s;
  const Tensor x = counting(s.stream, {2, 3});
  const Shape eight{4, 2};
  const std::vector<Real> two{1, 2}, three{1, 2, 3};
  CHECK(message_of<BadInput>([&] { x.reshaped(eight); }) ==
        "elements after reshaping [2, 3]: found 8, expected 6");
  CHECK(message_of<BadInput>([&] { x.rows(1, 2); }) ==
        "rows 1 to 3 are not in a tensor of shape [2, 3]");
  CHECK(message_of<BadInput>([&] { x.rows(-1, 1); }) ==
        "rows -1 to 0 are not in a tensor of shape [2, 3]");
  CHECK(message_of<BadInput>([&] { x.rows(1, -1); }) ==
        "rows 1 to 0 are not in a tensor of shape [2, 3]");
  CHECK(message_of<BadInput>([&] { x.range(4, {3}); }) ==
        "elements 4 to 7 are not in a tensor of shape [2, 3]");
  CHECK(message_of<BadInput>([&] { x.range(-1, {3}); }) ==
        "elements -1 to 2 are not in a tensor of shape [2, 3]");
  CHECK(message_of<BadInput>([&] { x.copy_from_host(three); }) ==
        "values for a tensor of shape [2, 3]: found 3, expected 6");
  CHECK(message_of<BadInput>([&] { Tensor::from_host(s.stream, x.shape(), two); }) ==
        "values for a tensor of shape [2, 3]: found 2, expected 6");
  CHECK(x.to_host() == std::vector<Real>{0, 1, 2, 3, 4, 5});
}

// --- Memory accounting ---------------------------------------------------------------------------

TEST_CASE("A memory counter knows what is in use, and the most there was", "[core]") {
  MemoryCounter counter;
  counter.add(100);
  counter.add(50);
  counter.subtract(120);
  counter.add(10);
  CHECK(counter.current() == 40);
  CHECK(counter.peak() == 150);
  counter.reset_peak();
  CHECK(counter.peak() == 40);
  counter.add(5);
  CHECK(counter.peak() == 45);
}

TEST_CASE("A memory counter loses nothing when threads count at once", "[core][tsan]") {
  constexpr int kThreads = 4, kTimes = 200000;
  MemoryCounter counter;
  std::atomic<int> ready{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      ++ready;
      while (ready < kThreads) std::this_thread::yield();  // a thread takes long to start
      for (int i = 0; i < kTimes; ++i) counter.add(3);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(counter.current() == 3 * kThreads * kTimes);
  CHECK(counter.peak() == 3 * kThreads * kTimes);
}

TEST_CASE("A buffer counts on its device from the host's request to the host's release", "[core]") {
  Setup s;
  const auto other = cpu::open_cpu_device(1, {});
  auto first = std::make_unique<Buffer>(s.stream, 1000);
  CHECK(s.device->memory().current() == 1000);
  {
    const Buffer second(s.stream, 500);
    CHECK(s.device->memory().current() == 1500);
    CHECK(reinterpret_cast<uintptr_t>(second.data()) % 64 == 0);
    CHECK(second.bytes() == 500);
    CHECK(second.home() == s.stream);
  }
  CHECK(s.device->memory().current() == 1000);
  first.reset();
  CHECK(s.device->memory().current() == 0);
  CHECK(s.device->memory().peak() == 1500);
  s.device->memory().reset_peak();
  CHECK(s.device->memory().peak() == 0);
  CHECK(other->memory().peak() == 0);
}

/// Whether the mapping that contains `address` asks for large pages (proc(5), smaps: VmFlags).
bool asks_for_large_pages(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      const auto wanted = reinterpret_cast<uintptr_t>(address);
      here = begin <= wanted && wanted < end;
    }
    if (here && line.starts_with("VmFlags:")) return line.find(" hg") != std::string::npos;
  }
  return false;
}

TEST_CASE("Large buffers ask for large pages", "[core]") {
  if (::access("/sys/kernel/mm/transparent_hugepage/enabled", R_OK) != 0) {
    LOCKSTEP_SKIP("no large pages");
  }
  Setup s;
  const Buffer large(s.stream, size_t{32} << 20);
  CHECK(asks_for_large_pages(static_cast<const char*>(large.data()) + (16 << 20)));
  const int small = 0;
  CHECK_FALSE(asks_for_large_pages(&small));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // there `new` ends the process
TEST_CASE("A buffer that does not fit is an error of the device, and is not counted", "[core]") {
  Setup s;
  const Buffer present(s.stream, size_t{3} << 20);
  CHECK(message_of<DeviceError>([&] { Buffer(s.stream, size_t{1} << 60); }) ==
        fmt::format(
            "cpu:0: no room for 1099511627776.0 MiB beside the 3.0 MiB in use{}; use a smaller "
            "batch or model, or more devices",
            memory_limit_note().data()));
  CHECK(s.device->memory().current() == int64_t{3} << 20);
  CHECK(s.device->memory().peak() == int64_t{3} << 20);
}
#endif

namespace {

void check_workspace_is_counted(EngineKind engine) {
  Setup s(engine);
  CAPTURE(s.device->description());
  Kernels& kernels = s.device->kernels();
  const Window2d g = make_window("conv", {4, 14, 14, 16}, 16, 32, 3, 1, 1);
  const Tensor x = Tensor::empty(s.stream, g.input()), y = Tensor::empty(s.stream, g.output());
  const Tensor weight = Tensor::empty(s.stream, g.weight());
  const Tensor dweight = Tensor::empty(s.stream, g.weight());
  const Tensor bias = Tensor::empty(s.stream, {32}), dbias = Tensor::empty(s.stream, {32});
  for (const Tensor& t : {x, y, weight, dweight, bias, dbias}) kernels.fill(s.stream, 1, t);
  s.stream.synchronize();
  const MemoryCounter& memory = s.device->memory();
  const int64_t tensors = memory.current();
  REQUIRE(memory.peak() == tensors);

  const auto forward_and_backward = [&] {
    kernels.conv2d(s.stream, g, x, weight, bias, y);
    kernels.conv2d_backward_input(s.stream, g, y, weight, x);
    kernels.conv2d_backward_parameters(s.stream, g, x, y, dweight, dbias);
    s.stream.synchronize();
  };
  forward_and_backward();
  // Either engine computes the weights' gradient next to the sum to which it is then added.
  const int64_t workspace = memory.current() - tensors;
  CHECK(workspace >= static_cast<int64_t>(dweight.bytes()));
  CHECK(memory.peak() == tensors + workspace);
  forward_and_backward();
  CHECK(memory.peak() == tensors + workspace);
}

}  // namespace

TEST_CASE("The workspaces of both convolution engines are counted on their device", "[core]") {
  for (const EngineKind engine : engines()) check_workspace_is_counted(engine);
}

TEST_CASE("A workspace grows to its largest request and counts that", "[core]") {
  const auto device = cpu::open_cpu_device(0, {});
  const Stream stream = device->create_stream("stream");
  const MemoryCounter& counter = device->memory();
  {
    cpu::Workspace workspace(dynamic_cast<CpuStream&>(stream.backend()));
    CHECK(counter.current() == 0);
    CHECK(reinterpret_cast<uintptr_t>(workspace.at_least(100)) % 64 == 0);
    CHECK(counter.current() == 100);
    void* larger = workspace.at_least(300);
    CHECK(counter.current() == 300);
    CHECK(workspace.at_least(200) == larger);
    CHECK(counter.current() == 300);
  }
  CHECK(counter.current() == 0);
  CHECK(counter.peak() == 300);
}

// --- The pool ------------------------------------------------------------------------------------

TEST_CASE("A pool allocates nothing in a steady state", "[core]") {
  Setup s;
  TensorPool pool(s.stream);
  for (int step = 0; step < 10; ++step) {
    const Tensor a = pool.take<Real>({64, 100});
    Tensor b = pool.take<Real>({64, 30});
    b = Tensor();
    const Tensor c = pool.take<Real>({64, 30});  // b's block
    const LabelTensor labels = pool.take<int32_t>({64});
    CHECK(pool.allocations() == 3);
  }
  CHECK(pool.stream() == s.stream);
}

TEST_CASE("Blocks that are out are nobody else's", "[core]") {
  Setup s;
  TensorPool pool(s.stream);
  std::vector<Tensor> out;
  for (int i = 0; i < 5; ++i) {
    out.push_back(pool.take<Real>({100}));
    s.device->kernels().fill(s.stream, Real(i), out.back());
  }
  CHECK(pool.allocations() == 5);
  for (int i = 0; i < 5; ++i) CHECK(out[i].to_host() == std::vector<Real>(100, Real(i)));
  // A view is a handle, too.
  const Tensor view = out[0].rows(0, 10);
  out.clear();
  for (int i = 0; i < 4; ++i) out.push_back(pool.take<Real>({100}));
  for (const Tensor& tensor : out) CHECK(tensor.data() != view.data());
  CHECK(pool.allocations() == 5);
}

TEST_CASE("A pool gives the smallest block that fits, but none more than twice too large",
          "[core]") {
  Setup s;
  TensorPool pool(s.stream);
  const auto bytes = [&](int64_t count) { return pool.take<uint8_t>({count}); };
  ByteTensor large = bytes(1920), small = bytes(1024), medium = bytes(1536);
  const uint8_t *at_large = large.data(), *at_small = small.data(), *at_medium = medium.data();
  large = small = medium = ByteTensor();

  CHECK(bytes(1000).data() == at_small);
  CHECK(bytes(1024).data() == at_small);
  CHECK(bytes(1025).data() == at_medium);
  CHECK(bytes(512).data() == at_small);
  CHECK(bytes(1900).data() == at_large);
  CHECK(pool.allocations() == 3);
  CHECK(bytes(448).bytes() == 448);  // a new block: 1024 is more than twice 448
  CHECK(pool.allocations() == 4);
  CHECK(bytes(1921).data() != at_large);
  CHECK(pool.allocations() == 5);
  // What is taken goes from what is free.
  const ByteTensor first = bytes(1000), second = bytes(1000), third = bytes(1000);
  CHECK(first.data() == at_small);
  CHECK(second.data() == at_medium);
  CHECK(third.data() == at_large);
  CHECK(pool.allocations() == 5);
}

TEST_CASE("Tensors of a pool outlive it, and then free their memory", "[core]") {
  Setup s;
  auto pool = std::make_unique<TensorPool>(s.stream);
  Tensor kept = pool->take<Real>({100});
  pool->take<Real>({100});
  s.device->kernels().fill(s.stream, 5, kept);
  pool.reset();
  CHECK(kept.to_host() == std::vector<Real>(100, 5));
  kept = Tensor();
  CHECK(s.device->memory().current() == 0);
}

TEST_CASE("A pool hands out empty tensors and scalars", "[core]") {
  Setup s;
  TensorPool pool(s.stream);
  CHECK(pool.take<Real>({0, 5}).to_host().empty());
  CHECK(pool.take<Real>({}).elements() == 1);
  CHECK(pool.allocations() == 1);
}

// --- A training step -----------------------------------------------------------------------------

namespace {

/// The seed network on one device, and a pool that serves its training steps.
struct PooledTraining {
  PooledTraining(Setup& setup, const Dataset& data, bool dropout, const DataLoaderOptions& options)
      : stream(setup.stream),
        model(make_model({.dropout = dropout})),
        parameters(*model.network, stream),
        optimizer(parameters, {.momentum = 0.9}),
        loader(data, options),
        feeder(stream, data),
        context(stream) {
    initialize(parameters, Initializer::kaiming_uniform, 1);
    loader.begin_epoch(0);
  }

  /// One step as stage 01 makes it.
  void step() {
    std::optional<HostBatch> batch = loader.next();
    REQUIRE(batch);
    optimizer.zero_gradients();
    const Tensor loss = parameters.loss();
    context.begin_step(
        {.step = steps++, .learning_rate = Real(0.01), .loss_weight = Real(1) / Real(batch->size)});
    const DeviceBatch& part = feeder.feed(*batch, context);
    const AnyTensor scores = model.network->forward(feeder.normalize(part, context), context);
    model.loss->forward(scores, part.labels, loss, context);
    model.network->backward(model.loss->backward(part.labels, context), context);
    optimizer.step(context.state(), loss);
    stream.synchronize();
  }

  Stream stream;
  Model model;
  FlatParameters parameters;
  Optimizer optimizer;
  DataLoader loader;
  Feeder feeder;
  Context context;
  int64_t steps = 0;
};

void check_steps_allocate_nothing(EngineKind engine, bool dropout) {
  Setup s(engine);
  CAPTURE(s.device->description(), dropout);
  const Dataset data = make_synthetic(SyntheticPart::train, 6 * 8 + 5);
  PooledTraining training(s, data, dropout, {.batch_size = 8});
  const MemoryCounter& memory = s.device->memory();

  training.step();
  const int64_t allocations = training.context.pool().allocations();
  const int64_t current = memory.current(), peak = memory.peak();
  REQUIRE(allocations > 0);
  for (int i = 0; i < 5; ++i) {
    training.step();
    CHECK(training.context.pool().allocations() == allocations);
    CHECK(memory.current() == current);
    CHECK(memory.peak() == peak);
  }
  training.step();  // the last 5 samples: other sizes, so it may find a block missing, once
  const int64_t after_epoch = training.context.pool().allocations();
  CHECK(after_epoch <= allocations + 2);
  training.loader.begin_epoch(1);
  for (int i = 0; i < 7; ++i) training.step();
  CHECK(training.context.pool().allocations() == after_epoch);
}

}  // namespace

TEST_CASE("A training step of the seed network allocates nothing after the first", "[core]") {
  for (const EngineKind engine : engines()) {
    for (const bool dropout : {false, true}) check_steps_allocate_nothing(engine, dropout);
  }
}

// --- Planted faults ------------------------------------------------------------------------------

#if defined(__SANITIZE_ADDRESS__)
namespace {

testing::ProcessResult planted(const std::string& mode) {
  return testing::run_process({testing::build_dir() + "/tests/unit/planted-faults", mode}, 60);
}

}  // namespace

TEST_CASE("AddressSanitizer reports memory that is freed while another stream still needs it",
          "[core]") {
  const testing::ProcessResult result = planted("use-after-free");
  INFO("status " << result.status << "\n" << result.err);
  CHECK(result.status > 0);
  CHECK_THAT(result.err, ContainsSubstring("AddressSanitizer: heap-use-after-free"));
}

TEST_CASE("AddressSanitizer is silent when the memory is handed back first", "[core]") {
  const testing::ProcessResult result = planted("use-after-free-fixed");
  CHECK(result.err == "");
  CHECK(result.status == 0);
}
#endif

}  // namespace lockstep
