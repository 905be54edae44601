// Streams and events of CPU devices: order, errors, memory, and the end of streams. The tasks here
// read and write plain variables: in the TSan build these tests also show that events order
// whatever needs order.

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "common/core/cpu_stream.h"
#include "common/core/error.h"
#include "common/core/tensor.h"
#include "common/kernels/devices.h"
#include "common/kernels/kernels.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/process.h"
#include "tests/support/tasks.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using testing::Clock;
using testing::enqueue;
using testing::Gate;
using testing::message_of;
using testing::ScopedEnvironment;
using testing::seconds_since;

std::unique_ptr<Device> open_cpu(int index = 0, const DeviceOptions& options = {}) {
  return open_device({DeviceId::Kind::cpu, index}, options);
}

CpuStream& backend(Stream stream) { return static_cast<CpuStream&>(stream.backend()); }

void enqueue_failure(Stream stream, std::string message) {
  enqueue(stream, [message] { throw BadInput(message); });
}

std::string error_of(Stream stream) {
  return message_of<BadInput>([&] { stream.synchronize(); });
}

constexpr size_t kLarge = size_t{64} << 20;  // the allocator gives it back to the system at once

/// Whether the memory of a Buffer of kLarge bytes has been freed.
bool is_freed(void* memory) {
#if defined(__SANITIZE_ADDRESS__)
  return __asan_address_is_poisoned(memory) != 0;
#else
  constexpr uintptr_t kPage = 4096;
  unsigned char resident = 0;
  void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(memory) / kPage * kPage);
  return ::mincore(page, kPage, &resident) != 0;
#endif
}

/// One number moves over three streams of two devices; each changes it in a different way, so that
/// any two steps in the wrong order, or lost, give a different result.
uint32_t wander_over_streams(int rounds) {
  uint32_t value = 1;
  const auto first = open_cpu(0), second = open_cpu(1);
  const std::vector<Stream> streams = {first->create_stream("a"), second->create_stream("b"),
                                       first->create_stream("c")};
  for (int i = 0; i < 3 * rounds; ++i) {
    const Stream stream = streams[i % 3];
    if (i > 0) stream.wait(streams[(i - 1) % 3].record());
    enqueue(stream, [&value, i] { value = value * 1664525u + static_cast<uint32_t>(i); });
  }
  streams[2].synchronize();
  return value;
}

uint32_t wander_alone(int rounds) {
  uint32_t value = 1;
  for (int i = 0; i < 3 * rounds; ++i) value = value * 1664525u + static_cast<uint32_t>(i);
  return value;
}

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
  for (int i = 0; i < 6000; ++i) stream.record();
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
  for (int i = 0; i < 6000; ++i) stream.record();
  const double backwards = first.seconds_since(second);  // waits for both
  CHECK(backwards <= -0.005);
  CHECK(second.seconds_since(first) == -backwards);
  CHECK(first.seconds_since(first) == 0);
  CHECK(message_of<BadInput>([&] { other.record_time().seconds_since(first); }) ==
        "the time between events of streams events and other: give two of one");
}

TEST_CASE("More events than the ring holds are told apart while they are outstanding",
          "[streams]") {
  constexpr int kEvents = 6000, kFirstPart = 3000;  // the ring has 4096 places
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
    backend(stream).enqueue("takes", [&] { backend(stream).count_workspace(50); });
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

// --- Errors --------------------------------------------------------------------------------------

TEST_CASE("The first error stays: later work is skipped, and every synchronize throws it",
          "[streams]") {
  int ran = 0;
  Real untouched = 1;
  const Real other = 2;
  const auto device = open_cpu();
  const Stream stream = device->create_stream("stream");
  enqueue(stream, [&] { ++ran; });
  enqueue_failure(stream, "the first error");
  enqueue_failure(stream, "the second error");
  enqueue(stream, [&] { ++ran; });
  stream.copy(&untouched, &other, sizeof other);
  const Event event = stream.record();

  CHECK(error_of(stream) == "the first error");
  CHECK(error_of(stream) == "the first error");
  CHECK(message_of<BadInput>([&] { event.synchronize(); }) == "the first error");
  CHECK(event.done());
  enqueue(stream, [&] { ++ran; });
  CHECK(error_of(stream) == "the first error");
  CHECK(ran == 1);
  CHECK(untouched == Real(1));
}

TEST_CASE("On a failed stream events, frees and control tasks still run", "[streams]") {
  bool control = false;
  const auto device = open_cpu();
  const Stream stream = device->create_stream("stream");
  auto buffer = std::make_unique<Buffer>(stream, kLarge);
  void* memory = buffer->data();
  enqueue_failure(stream, "failed");
  backend(stream).enqueue_control("control", [&] { control = true; });
  buffer.reset();
  const Event event = stream.record();
  CHECK(message_of<BadInput>([&] { event.synchronize(); }) == "failed");
  CHECK(event.done());
  CHECK(control);
  CHECK(is_freed(memory));
}

TEST_CASE("An error travels through wait() to the stream that waits, and not back", "[streams]") {
  int ran = 0;
  const auto first = open_cpu(0), second = open_cpu(1);
  const Stream healthy = first->create_stream("healthy");
  const Stream failing = first->create_stream("failing");
  const Stream next = second->create_stream("next");
  const Stream last = second->create_stream("last");

  enqueue(healthy, [&] { ++ran; });
  failing.wait(healthy.record());
  enqueue_failure(failing, "it failed here");
  next.wait(failing.record());
  enqueue(next, [&] { ran += 10; });
  last.wait(next.record());
  enqueue(last, [&] { ran += 100; });

  const Stream with_its_own = second->create_stream("with its own");
  enqueue_failure(with_its_own, "it failed before");
  with_its_own.wait(last.record());

  CHECK(error_of(with_its_own) == "it failed before");
  const auto lost_peer = [](Stream stream) {
    return message_of<PeerLost>([&] { stream.synchronize(); });
  };
  CHECK(lost_peer(last) == "cpu:0 failed: it failed here");  // another device's: it is named
  CHECK(lost_peer(next) == "cpu:0 failed: it failed here");
  CHECK(error_of(failing) == "it failed here");
  CHECK_NOTHROW(healthy.synchronize());
  CHECK(ran == 1);
  enqueue(healthy, [&] { ++ran; });
  CHECK_NOTHROW(healthy.synchronize());
  CHECK(ran == 2);
}

// --- Memory and the end --------------------------------------------------------------------------

TEST_CASE("Memory is freed in stream order: after what was enqueued before", "[streams]") {
  Gate gate;
  const auto device = open_cpu();
  const Stream home = device->create_stream("home");
  const Stream other = device->create_stream("other");
  auto buffer = std::make_unique<Buffer>(home, kLarge);
  char* memory = static_cast<char*>(buffer->data());

  SECTION("work on the home stream") {
    enqueue(home, [&gate, memory] {
      gate.pass();
      memory[kLarge - 1] = 1;
    });
  }
  SECTION("work on another stream that hands the buffer back") {
    enqueue(other, [&gate, memory] {
      gate.pass();
      memory[kLarge - 1] = 1;
    });
    home.wait(other.record());
  }
  SECTION("the same where the home stream has failed") {
    enqueue_failure(home, "failed");
    enqueue(other, [&gate, memory] {
      gate.pass();
      memory[kLarge - 1] = 1;
    });
    home.wait(other.record());
  }
  buffer.reset();
  CHECK(device->memory().current() == 0);  // counted when the host asks, not when it happens
  std::this_thread::sleep_for(milliseconds(20));
  CHECK_FALSE(is_freed(memory));
  gate.open();
  home.backend().block(home.backend().record());
  CHECK(is_freed(memory));
}

TEST_CASE("A device that goes while work is queued runs all of it", "[streams]") {
  std::atomic<int> ran{0};
  auto device = open_cpu();
  for (const char* name : {"first", "second"}) {
    const Stream stream = device->create_stream(name);
    for (int i = 0; i < 20; ++i) {
      enqueue(stream, [&ran] {
        std::this_thread::sleep_for(milliseconds(1));
        ran.fetch_add(1, std::memory_order_relaxed);
      });
    }
    Buffer(stream, 1000);  // a free among what is queued
  }
  device.reset();
  REQUIRE(ran.load() == 40);
}

namespace {

std::vector<int> order_when_streams_go_while_they_wait(bool same_device) {
  std::vector<int> order;
  auto one = open_cpu(0), two = open_cpu(1);
  const Stream first = one->create_stream("first");
  const Stream second = (same_device ? one : two)->create_stream("second");
  enqueue(first, [&] { order.push_back(1); });
  enqueue(second, [] { std::this_thread::sleep_for(milliseconds(50)); });
  second.wait(first.record());
  enqueue(second, [&] { order.push_back(2); });
  first.wait(second.record());
  enqueue(first, [&] { order.push_back(3); });
  second.wait(first.record());
  enqueue(second, [&] { order.push_back(4); });
  one.reset();  // it has nothing more to do while `second` still comes to wait for it
  two.reset();
  return order;
}

}  // namespace

TEST_CASE("A stream stays as long as others still have to wait for its events", "[streams]") {
  CHECK(order_when_streams_go_while_they_wait(true) == std::vector<int>{1, 2, 3, 4});
  CHECK(order_when_streams_go_while_they_wait(false) == std::vector<int>{1, 2, 3, 4});
}

TEST_CASE("A device with a failed stream goes without a word", "[streams]") {
  bool ran = false;
  auto device = open_cpu();
  const Stream failing = device->create_stream("failing");
  const Stream other = device->create_stream("other");
  enqueue_failure(failing, "nobody asks for this error");
  enqueue(other, [&] { ran = true; });
  device.reset();
  REQUIRE(ran);
}

// --- Delays and idling ---------------------------------------------------------------------------

TEST_CASE("LOCKSTEP_CHAOS delays every operation and changes no result", "[streams]") {
  const ScopedEnvironment chaos("LOCKSTEP_CHAOS", "1000");
  const auto begin = Clock::now();
  // Every round waits one after another for nine operations, each delayed by 0.5 ms on average.
  CHECK(wander_over_streams(20) == wander_alone(20));
  CHECK(seconds_since(begin) > 0.03);
}

TEST_CASE("LOCKSTEP_CHAOS is a number as a whole, or is refused", "[streams]") {
  for (const char* text : {"200us", "x", "-1", "1000001", "1e3", " 1", "0x10"}) {
    const ScopedEnvironment chaos("LOCKSTEP_CHAOS", text);
    CHECK(message_of<BadInput>([] { open_cpu(0)->create_stream("one"); }) ==
          fmt::format("LOCKSTEP_CHAOS={}: expected a whole number from 0 to 1000000", text));
  }
  const ScopedEnvironment chaos("LOCKSTEP_CHAOS", "");
  CHECK_NOTHROW(open_cpu(0)->create_stream("one"));
}

TEST_CASE("LOCKSTEP_CHAOS delays two streams differently", "[streams]") {
  const ScopedEnvironment chaos("LOCKSTEP_CHAOS", "3000");
  constexpr int kTasks = 30;
  std::vector<std::vector<double>> times(2, std::vector<double>(kTasks));
  const auto begin = Clock::now();
  const auto first = open_cpu(0), second = open_cpu(1);
  const std::vector<Stream> streams = {first->create_stream("same"), second->create_stream("same")};
  for (int i = 0; i < kTasks; ++i) {
    for (int s : {0, 1}) enqueue(streams[s], [&, s, i] { times[s][i] = seconds_since(begin); });
  }
  for (const Stream& stream : streams) stream.synchronize();
  double difference = 0;
  for (int i = 1; i < kTasks; ++i) {
    const double delays[2] = {times[0][i] - times[0][i - 1], times[1][i] - times[1][i - 1]};
    difference += std::abs(delays[0] - delays[1]) / (kTasks - 1);
  }
  CHECK(difference > 0.0005);  // two independent delays of 0 to 3 ms: 1 ms apart on average
}

#if !defined(__SANITIZE_THREAD__)  // there workers poll
namespace {

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace

TEST_CASE("Workers without work, and those that wait for an event, sleep", "[streams]") {
  Gate gate;
  const auto first = open_cpu(0), second = open_cpu(1);
  const Stream idle = first->create_stream("idle"), waiting = second->create_stream("waiting");
  const Stream blocked = second->create_stream("blocked");
  idle.synchronize();
  enqueue(blocked, [&] { gate.pass(); });
  waiting.wait(blocked.record());

  double least = 1;  // best of three: other threads of the process may have an errand of their own
  for (int i = 0; i < 3; ++i) {
    const double before = cpu_seconds();
    std::this_thread::sleep_for(milliseconds(200));
    least = std::min(least, cpu_seconds() - before);
  }
  gate.open();
  waiting.synchronize();
  CHECK(least < 0.02);
}
#endif

}  // namespace lockstep
