// Streams and events of CPU devices. The tasks here read and write plain variables: in the TSan
// build these tests also show that events order whatever needs order.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "common/core/error.h"
#include "common/core/stream_backend.h"
#include "common/core/tensor.h"
#include "common/kernels/kernels.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/process.h"
#include "tests/support/tasks.h"

#include "tests/unit/core/streams_test_support.h"

namespace lockstep {
namespace {

using namespace testing::streams;
using std::chrono::milliseconds;
using testing::Clock;
using testing::enqueue;
using testing::Gate;
using testing::message_of;
using testing::seconds_since;

}  // namespace

// --- Order ---------------------------------------------------------------------------------------

TEST_CASE("A stream runs its operations in the order in which they were enqueued", "[streams]") {
  std::vector<int> order, expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  const auto device = open_cpu();
  const Stream stream = device->create_stream("stream");
  for (int i = 0; i < 1000; ++i) enqueue(stream, [&order, i] { order.push_back(i); });
  stream.synchronize();
  REQUIRE(order == expected);
}

TEST_CASE("A hundred thousand operations run once each and in order", "[streams]") {
  constexpr int kTasks = 100000;
  int next = 0, out_of_order = 0;
  const auto device = open_cpu();
  const Stream stream = device->create_stream("stream");
  for (int i = 0; i < kTasks; ++i) enqueue(stream, [&, i] { out_of_order += next++ != i; });
  stream.synchronize();
  REQUIRE(next == kTasks);
  REQUIRE(out_of_order == 0);
}

TEST_CASE("What follows a wait starts after the event, and no other stream is held up",
          "[streams]") {
  Gate gate;
  int written = 0, read = 0;
  std::atomic<bool> started{false};
  const auto device = open_cpu();
  const Stream writer = device->create_stream("writer");
  const Stream reader = device->create_stream("reader");
  const Stream bystander = device->create_stream("bystander");

  enqueue(writer, [&] {
    gate.pass();
    written = 7;
  });
  reader.wait(writer.record());
  enqueue(reader, [&] {
    started.store(true, std::memory_order_relaxed);
    read = written;
  });
  bystander.synchronize();
  std::this_thread::sleep_for(milliseconds(30));
  CHECK_FALSE(started.load(std::memory_order_relaxed));

  gate.open();
  reader.synchronize();
  REQUIRE(read == 7);
}

TEST_CASE("Waiting for an event that is long done, or twice, changes nothing", "[streams]") {
  int written = 0, read = 0;
  const auto device = open_cpu();
  const Stream writer = device->create_stream("writer");
  const Stream reader = device->create_stream("reader");
  enqueue(writer, [&] { written = 7; });
  const Event event = writer.record();
  std::this_thread::sleep_for(milliseconds(20));
  reader.wait(event);
  reader.wait(event);
  enqueue(reader, [&] { read = written; });
  reader.synchronize();
  REQUIRE(read == 7);
  REQUIRE(event.done());
}

TEST_CASE("A stream that waits for its own event goes on", "[streams]") {
  bool ran = false;
  const auto device = open_cpu();
  const Stream stream = device->create_stream("stream");
  stream.wait(stream.record());
  enqueue(stream, [&] { ran = true; });
  stream.synchronize();
  REQUIRE(ran);
}

TEST_CASE("Events order a chain of steps over three streams of two devices", "[streams]") {
  REQUIRE(wander_over_streams(1500) == wander_alone(1500));
}

TEST_CASE("Copies and kernels keep their place in the order of streams", "[streams]") {
  const int64_t elements = 1000;
  const std::vector<Real> ones(elements, 1);
  std::vector<Real> result(elements);
  const auto first = open_cpu(0), second = open_cpu(1);
  const Stream here = first->create_stream("here"), there = second->create_stream("there");
  const Tensor x = Tensor::empty(here, {elements}), y = Tensor::empty(there, {elements});

  here.copy(x.data(), ones.data(), x.bytes());
  first->kernels().scale(here, 3, x);
  there.wait(here.record());
  there.copy(y.data(), x.data(), y.bytes());
  here.wait(there.record());
  first->kernels().fill(here, 100, x);  // too late to change y
  second->kernels().scale(there, 2, y);
  there.copy(result.data(), y.data(), y.bytes());
  there.synchronize();
  REQUIRE(result == std::vector<Real>(elements, 6));
}

// --- The host ------------------------------------------------------------------------------------

TEST_CASE("The host never blocks on a stream that cannot go on", "[streams]") {
  Gate gate;
  std::vector<Real> host(100);
  int ran = 0;
  const auto device = open_cpu();
  const Stream blocked = device->create_stream("blocked");
  const Stream waiting = device->create_stream("waiting");
  enqueue(blocked, [&] { gate.pass(); });

  const auto begin = Clock::now();
  std::vector<Event> events;
  for (int i = 0; i < 500; ++i) {
    const Tensor x = Tensor::empty(blocked, {100});
    device->kernels().fill(blocked, 1, x);
    blocked.copy(host.data(), x.data(), x.bytes());
    events.push_back(blocked.record());
    waiting.wait(events.back());
    enqueue(waiting, [&] { ++ran; });
    blocked.wait(waiting.record());
  }
  const bool none_done = std::none_of(events.begin(), events.end(), std::mem_fn(&Event::done));
  const double seconds = seconds_since(begin);
  gate.open();
  blocked.synchronize();
  CHECK(none_done);
  CHECK(seconds < 5);  // the gate would have held it up for 20
  REQUIRE(ran == 500);
  REQUIRE(host == std::vector<Real>(100, 1));
}

TEST_CASE("An event is done when all before it has run, and stays done", "[streams]") {
  Gate gate;
  int ran = 0;
  const auto device = open_cpu();
  const Stream stream = device->create_stream("stream");
  const Event before = stream.record();
  before.synchronize();
  enqueue(stream, [&] { gate.pass(); });
  enqueue(stream, [&] { ++ran; });
  const Event after = stream.record();
  const Event copy = after;

  std::this_thread::sleep_for(milliseconds(20));
  CHECK(before.done());
  CHECK_FALSE(after.done());
  gate.open();
  while (!copy.done()) std::this_thread::yield();
  CHECK(ran == 1);  // done() orders the host after the task
  for (int i = 0; i < 3000; ++i) stream.record();
  stream.synchronize();
  CHECK(after.done());
  CHECK(before.done());
}

TEST_CASE("Times between events are real, however many others the stream records", "[streams]") {
  const auto device = open_cpu();
  const Stream stream = device->create_stream("events"), other = device->create_stream("other");
  const TimedEvent first = stream.record_time();
  enqueue(stream, [] { std::this_thread::sleep_for(milliseconds(5)); });
  const TimedEvent second = stream.record_time();
  for (int i = 0; i < 3000; ++i) stream.record();
  const double backwards = first.seconds_since(second);  // waits for both
  CHECK(backwards <= -0.005);
  CHECK(second.seconds_since(first) == -backwards);
  CHECK(first.seconds_since(first) == 0);
  CHECK(message_of<BadInput>([&] { other.record_time().seconds_since(first); }) ==
        "the time between events of streams events and other: give two of one");
}

TEST_CASE("More events than the ring holds are told apart while they are outstanding",
          "[streams]") {
  constexpr int kEvents = 3000, kFirstPart = 1500;  // the ring has 1024 places
  Gate gate, second_gate;
  std::vector<int> written(kEvents, 0), read(kEvents, 0), ones(kEvents, 1);
  const auto device = open_cpu();
  const Stream writer = device->create_stream("writer");
  const Stream reader = device->create_stream("reader");

  std::vector<Event> events;
  enqueue(writer, [&] { gate.pass(); });
  for (int i = 0; i < kEvents; ++i) {
    if (i == kFirstPart) enqueue(writer, [&] { second_gate.pass(); });
    enqueue(writer, [&, i] { written[i] = 1; });
    events.push_back(writer.record());
    reader.wait(events[i]);
    enqueue(reader, [&, i] { read[i] = written[i]; });
  }
  const auto done = [](const Event& event) { return event.done(); };
  CHECK(std::none_of(events.begin(), events.end(), done));

  gate.open();
  events[kFirstPart - 1].synchronize();
  CHECK(std::all_of(events.begin(), events.begin() + kFirstPart, done));
  CHECK(std::none_of(events.begin() + kFirstPart, events.end(), done));

  second_gate.open();
  reader.synchronize();
  CHECK(std::all_of(events.begin(), events.end(), done));
  REQUIRE(read == ones);
}

TEST_CASE("A task's captures go when it has run, not when the next one comes", "[streams]") {
  auto captured = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = captured;
  const auto device = open_cpu();
  const Stream stream = device->create_stream("stream");
  enqueue(stream, [held = std::move(captured)] {});
  const auto begin = Clock::now();
  while (!watched.expired() && seconds_since(begin) < 10) std::this_thread::yield();
  REQUIRE(watched.expired());
}

TEST_CASE("With tracing, a stream keeps name, scope and times of its operations", "[streams]") {
  const auto device = open_cpu(0, {.threads = 1, .trace = true});
  const Stream stream = device->create_stream("stream");
  backend(stream).enqueue("outside", [] {});
  {
    const ScopedRange outer(stream, "block1");
    const ScopedRange inner(stream, "conv1");
    backend(stream).enqueue("inside", [] { std::this_thread::sleep_for(milliseconds(2)); });
  }
  stream.synchronize();
  const std::vector<Span> spans = stream.backend().timeline();
  REQUIRE(spans.size() == 2);
  CHECK(std::string(spans[0].op) == "outside");
  CHECK(spans[0].scope == nullptr);
  CHECK(std::string(spans[1].op) == "inside");
  REQUIRE(spans[1].scope != nullptr);
  CHECK(*spans[1].scope == "block1/conv1");
  CHECK(spans[1].begin_ns >= spans[0].end_ns);
  CHECK(spans[1].end_ns - spans[1].begin_ns >= 2000000);
}

TEST_CASE("With tracing, a stream notes its memory when it comes to it, not when the host asks",
          "[streams]") {
  const auto device = open_cpu(0, {.threads = 1, .trace = true});
  const Stream stream = device->create_stream("stream");
  const auto slow = [&] {
    backend(stream).enqueue("slow", [] { std::this_thread::sleep_for(milliseconds(2)); });
  };
  slow();
  {
    const Buffer buffer(stream, 1000);
    backend(stream).enqueue("takes", [&] { backend(stream).count_memory(50); });
    stream.begin_capture();
    const Buffer of_a_graph(stream, 200);
    slow();
    const std::unique_ptr<Graph> graph = stream.end_capture();
    for (int i = 0; i < 2; ++i) stream.launch(*graph);
  }
  stream.synchronize();
  const std::vector<Span> spans = stream.backend().timeline();
  const std::vector<MemoryChange> changes = stream.backend().memory_changes();
  REQUIRE(spans.size() == 4);
  std::vector<int64_t> bytes, times;
  for (const auto& [at_ns, change] : changes) bytes.push_back(change), times.push_back(at_ns);
  REQUIRE(bytes == std::vector<int64_t>{1000, 50, 200, -200, -1000});
  CHECK(std::is_sorted(times.begin(), times.end()));
  CHECK(spans[0].end_ns <= times[0]);
  CHECK(times[2] <= spans[2].begin_ns);
  CHECK(spans[3].end_ns <= times[3]);
}

TEST_CASE("Without tracing, a stream notes nothing", "[streams]") {
  const auto device = open_cpu();
  const Stream stream = device->create_stream("stream");
  const Buffer buffer(stream, 1000);
  stream.synchronize();
  CHECK(stream.backend().memory_changes().empty());
}

TEST_CASE("A scope within another names both, a block's layer bears the block's name once",
          "[streams]") {
  const std::string forward = "forward 2", block = "forward 2/block1", plain = "block1";
  CHECK(scope_within(nullptr, "conv1") == "conv1");
  CHECK(scope_within(&forward, "block1") == "forward 2/block1");
  CHECK(scope_within(&block, "block1.conv1") == "forward 2/block1.conv1");
  CHECK(scope_within(&plain, "block1.conv1") == "block1.conv1");
  CHECK(scope_within(&plain, "block10") == "block1/block10");
}

// --- Planted faults ------------------------------------------------------------------------------

#if defined(__SANITIZE_THREAD__)
namespace {

testing::ProcessResult planted(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), testing::build_dir() + "/tests/unit/planted-faults");
  return testing::run_process(std::move(arguments), 60);
}

}  // namespace

TEST_CASE("ThreadSanitizer reports a missing wait, however late the host is", "[streams]") {
  for (const char* pace : {"fast", "late"}) {
    for (int i = 0; i < 5; ++i) {
      const testing::ProcessResult result = planted({"missing-wait", pace});
      INFO(pace << " host, run " << i << ", status " << result.status << "\n" << result.err);
      CHECK(result.status > 0);
      CHECK_THAT(result.err, Catch::Matchers::ContainsSubstring("ThreadSanitizer: data race"));
    }
  }
}

TEST_CASE("ThreadSanitizer reports memory that is freed while another stream may use it",
          "[streams]") {
  const testing::ProcessResult result = planted({"use-after-free"});
  INFO(result.err);
  CHECK(result.status > 0);
  CHECK_THAT(result.err, Catch::Matchers::ContainsSubstring("WARNING: ThreadSanitizer: "));
}

TEST_CASE("ThreadSanitizer is silent when the streams wait", "[streams]") {
  const std::vector<std::vector<std::string>> correct = {
      {"with-wait", "fast"}, {"with-wait", "late"}, {"use-after-free-fixed"}};
  for (const auto& arguments : correct) {
    for (int i = 0; i < 5; ++i) {
      const testing::ProcessResult result = planted(arguments);
      INFO(arguments[0] << ", run " << i);
      CHECK(result.status == 0);
      CHECK(result.err == "");
    }
  }
}
#endif

}  // namespace lockstep
