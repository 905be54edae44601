// Errors on streams, memory and the end of streams, delays and idling.

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "common/core/error.h"
#include "common/core/tensor.h"
#include "common/kernels/kernels.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
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
using testing::ScopedEnvironment;
using testing::seconds_since;

}  // namespace

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
