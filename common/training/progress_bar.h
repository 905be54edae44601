#pragma once
// The last line of a terminal while an epoch runs.

#include <cstdint>

namespace lockstep {

/// "[=====     ]  50% 12345 samples/s". Nothing where stdout is not a terminal.
class ProgressBar {
 public:
  /// `samples`: the number in an epoch; without `wanted` nothing is ever shown.
  ProgressBar(int64_t samples, bool wanted);

  /// That many samples of the epoch took so many seconds. Draws only what has changed.
  void show(int64_t samples_done, double seconds);
  /// Erases the bar, so that another line can be printed.
  void clear();

 private:
  int64_t samples_;
  bool terminal_;
  int shown_percent_ = -1;
};

}  // namespace lockstep
