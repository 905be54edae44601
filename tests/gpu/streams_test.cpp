// Streams of a GPU: order, host tasks, traces and graphs; what streams_test.cpp of tests/unit shows
// for CPU devices, as far as the host can see it.

#include <optional>

#include "common/core/stream_backend.h"
#include "common/data/synthetic.h"
#include "common/kernels/cuda/cuda.h"
#include "common/training/step_graph.h"
#include "tests/gpu/busy_gpu.h"
#include "tests/gpu/gpu_test_support.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using namespace testing::gpu;
using Catch::Matchers::StartsWith;
using testing::kGpu;
using testing::message_of;
using testing::random_values;
using Values = std::vector<Real>;

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

TEST_CASE("The host is some hundred operations ahead of a GPU and no more: then it waits",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Tensor y = gpu.filled({16}, 0);
  testing::occupy(gpu.stream, 0.3);
  const Event first = gpu.stream.record();
  for (int i = 0; i < 1000; ++i) gpu.stream.kernels().fill(gpu.stream, 1, y);
  CHECK(first.done());
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
  for (int i = 0; i < 6000; ++i) gpu.stream.record();  // more events than any ring holds
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
  for (int i = 0; i < 6000; ++i) gpu.stream.record();
  CHECK(second.seconds_since(first) > 1e-5);
  CHECK(second.seconds_since(second) == 0);
}

TEST_CASE("An event with a time is used again, but not while somebody may ask for the time",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  std::optional<TimedEvent> kept;
  {
    const Gpu gpu({.trace = true});
    const Busy busy(gpu.stream, 20);
    const TimedEvent first = gpu.stream.record_time();
    busy.enqueue();
    const TimedEvent second = gpu.stream.record_time();
    const double seconds = second.seconds_since(first);
    for (int i = 0; i < 100; ++i) {
      kept = gpu.stream.record_time();
      kept->synchronize();
    }
    CHECK(second.seconds_since(first) == seconds);
    CHECK(kept->seconds_since(second) > 0);
  }
  kept.reset();  // may outlive its stream
}

TEST_CASE("However often a GPU is asked for times, it needs no more events for that",
          "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  if (!testing::is_model(*gpu.device)) {
    LOCKSTEP_SKIP("not the CUDA model: a real GPU fails when it wants");
  }
  for (int i = 0; i < 5000; ++i) gpu.stream.record_time();  // and all places for other events
  const testing::ScopedEnvironment fault("CUDA_MODEL_FAULT", "cudaEventCreateWithFlags:2");
  for (int i = 0; i < 100; ++i) CHECK_NOTHROW(gpu.stream.record_time());
}

// --- Host tasks ----------------------------------------------------------------------------------

TEST_CASE("A host task runs after what its GPU stream has to do before, and before what comes",
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

TEST_CASE("An exception of a host task comes up on every stream of the GPU, after any copy",
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

TEST_CASE("A GPU's trace has memory in the order of its stream", "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu({.trace = true});
  gpu.stream.synchronize();
  const size_t before = gpu.stream.backend().memory_changes().size();  // the stream's own
  const Tensor x = Tensor::empty(gpu.stream, {1024});
  gpu.kernels().fill(gpu.stream, 1, x);
  Tensor::empty(gpu.stream, {256});
  gpu.kernels().fill(gpu.stream, 2, x);
  gpu.stream.synchronize();
  const std::vector<Span> spans = gpu.stream.backend().timeline();
  std::vector<MemoryChange> changes = gpu.stream.backend().memory_changes();
  changes.erase(changes.begin(), changes.begin() + std::ptrdiff_t(before));
  REQUIRE(spans.size() == 2);
  REQUIRE(changes.size() == 3);
  CHECK(changes[0].bytes == 4096);
  CHECK(changes[1].bytes == 1024);
  CHECK(changes[2].bytes == -1024);
  CHECK(changes[0].at_ns <= spans[0].begin_ns);
  CHECK(spans[0].end_ns <= changes[1].at_ns);
  CHECK(changes[1].at_ns <= changes[2].at_ns);
  CHECK(changes[2].at_ns <= spans[1].begin_ns);
}

TEST_CASE("A GPU that is not traced keeps no spans", "[cuda][device]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  gpu.kernels().fill(gpu.stream, 1, Tensor::empty(gpu.stream, {1024}));
  gpu.stream.synchronize();
  CHECK(gpu.stream.backend().timeline().empty());
  CHECK(gpu.stream.backend().memory_changes().empty());
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

TEST_CASE("What is released during a capture stays with the graph that may use it",
          "[cuda][device][graph]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Tensor y = gpu.filled({1000}, 0);
  std::optional<Tensor> x = gpu.filled({1000}, 1);
  gpu.stream.begin_capture();
  gpu.kernels().add(gpu.stream, *x, y);
  x.reset();  // an exception here ends the process
  std::unique_ptr<Graph> graph = gpu.stream.end_capture();
  std::vector<Tensor> held;  // would get what x had, were it free
  for (int i = 0; i < 20; ++i) held.push_back(gpu.filled({1000}, 9));
  for (int i = 0; i < 2; ++i) gpu.stream.launch(*graph);
  graph.reset();  // what was launched may not have run
  CHECK(y.to_host() == Values(1000, 2));
}

TEST_CASE("Memory that runs out during a capture is one error, and the next step is captured",
          "[cuda][device][graph]") {
  LOCKSTEP_NEEDS_GPU();
  const Gpu gpu;
  const Tensor y = gpu.filled({1000}, 1);
  Context context(gpu.stream);
  StepGraph graph(context, /*enabled=*/true, /*full_size=*/1);
  bool fails = false;
  const auto work = [&] {
    const Tensor x = Tensor::empty(gpu.stream, {1000});  // released during the capture
    gpu.kernels().fill(gpu.stream, 1, x);
    if (fails) Tensor::empty(gpu.stream, {int64_t{1} << 38});  // a TiB
    gpu.kernels().add(gpu.stream, x, y);
  };
  graph.run(1, work);  // as it is
  fails = true;
  CHECK_THAT(message_of<DeviceError>([&] { graph.run(1, work); }),
             StartsWith("cuda:0: no room for 1048576.0 MiB beside the "));
  CHECK(y.to_host() == Values(1000, 2));  // nothing was run
  fails = false;
  for (int i = 0; i < 3; ++i) graph.run(1, work);
  CHECK(y.to_host() == Values(1000, 5));
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
