#pragma once
// Nobody waits for ever: a point in time, and what poll() needs to know about it.

#include <algorithm>
#include <chrono>
#include <cmath>

namespace lockstep {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// `seconds` from now; 0 or less, or NaN, has already passed.
  explicit Deadline(double seconds)
      : seconds_(seconds > 0 ? std::min(seconds, kLongest) : 0),
        time_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                 std::chrono::duration<double>(seconds_))) {}

  /// The length that it was set to, for error texts.
  double seconds() const { return seconds_; }
  Clock::time_point time() const { return time_; }
  bool passed() const { return Clock::now() >= time_; }
  /// 0 once it has passed.
  double seconds_left() const {
    return std::max(0.0, std::chrono::duration<double>(time_ - Clock::now()).count());
  }
  /// The timeout that poll() takes, rounded up: a loop must not spin through the last millisecond.
  int poll_ms() const { return static_cast<int>(std::ceil(std::min(seconds_left(), 1e6) * 1e3)); }

 private:
  static constexpr double kLongest = 1e8;  // three years; more would overflow the clock's count
  double seconds_;
  Clock::time_point time_;
};

/// The deadline that comes first.
inline const Deadline& earlier(const Deadline& a, const Deadline& b) {
  return a.time() < b.time() ? a : b;
}

}  // namespace lockstep
