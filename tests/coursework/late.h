#pragma once
// A stream that is late, which shows who should wait for it and does not.

#include <deque>

#include "tests/support/machine.h"
#include "tests/support/tasks.h"

namespace lockstep::testing {

/// CPU devices with a stream each, any of which can be held up. What they did can be looked up.
struct LateMachine {
  explicit LateMachine(int devices) : machine(cpus(devices), {.trace = true}) {}
  ~LateMachine() { let_go(); }  // a test that failed must not wait

  Stream stream(size_t device) const { return machine.streams[device]; }
  /// Holds a device up from here on.
  void hold(size_t device) {
    Gate& gate = gates.emplace_back(kPatience);
    enqueue(stream(device), [&gate] { gate.pass(); });
  }
  void let_go() {
    for (Gate& gate : gates) gate.open();
  }
  /// Whether an event completes, in a few seconds at most.
  static bool comes(const Event& event, double seconds = 3) {
    const auto begin = Clock::now();
    while (!event.done() && seconds_since(begin) < seconds) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return event.done();
  }
  /// Releases the device held up, but not before `device` has done all that it does without
  /// waiting.
  void let_go_after(size_t device) {
    comes(stream(device).record(), kMoment);
    let_go();
  }

  static constexpr double kPatience = 5;   // seconds; then a waiting host is reported
  static constexpr double kMoment = 0.15;  // seconds: a hundred times what a device needs
  std::deque<Gate> gates;                  // before the devices, whose tasks refer to them
  Machine machine;
};

}  // namespace lockstep::testing
