#pragma once
// Tasks on the streams of CPU devices, and the time they take.

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "common/core/cpu_stream.h"
#include "common/core/error.h"

namespace lockstep::testing {

using Clock = std::chrono::steady_clock;

// In seconds.
constexpr double kLong = 60;    // no test takes this long
constexpr double kSoon = 5;     // whatever is reported at once takes less, even on a busy machine
constexpr double kShort = 0.3;  // for what must time out

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// The stream runs `body` in its order; `op` (a literal) is its name in a trace.
inline void enqueue(Stream stream, const char* op, std::function<void()> body) {
  static_cast<CpuStream&>(stream.backend()).enqueue(op, std::move(body));
}
inline void enqueue(Stream stream, std::function<void()> body) {
  enqueue(stream, "task", std::move(body));
}

/// Holds up the tasks that come to pass() until the host opens it. In every test the things that
/// tasks use are declared before the device: a device runs what is still queued when it is
/// destroyed.
class Gate {
 public:
  explicit Gate(double patience_seconds = 20) : patience_(patience_seconds) {}
  void open() { open_.store(true, std::memory_order_release); }
  void pass() const {
    const auto begin = Clock::now();
    while (!open_.load(std::memory_order_acquire)) {
      if (seconds_since(begin) > patience_) fail<EnvironmentError>("the gate was never opened");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  double patience_;
  std::atomic<bool> open_{false};
};

}  // namespace lockstep::testing
