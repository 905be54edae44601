#pragma once
// How long each phase of a step takes.

#include <deque>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/core/stream.h"

namespace lockstep {

/// Times phases by events in one stream. A phase lasts from the end of the one before it to the
/// point in the stream where its own end was recorded. Waits for other devices count. So the phases
/// of a step add up to its whole time. Times are read once the device has passed them: the host
/// does not wait before settle().
class PhaseTimer {
 public:
  explicit PhaseTimer(Stream stream) : stream_(stream) {}

  /// A new series of phases starts here.
  void start();
  /// The phase called `name` (a literal) ends here. Does nothing between series, as in evaluation.
  void end(const char* name);
  void stop() { running_ = false; }

  /// Reads the times of all phases so far. Waits for those that are still under way.
  void settle();

  /// Name and total seconds of every phase over all series, in the order of first occurrence.
  /// Settles.
  const std::vector<std::pair<std::string, double>>& totals();
  /// Seconds of the phase of that name; 0 if there was none. Settles.
  double total(std::string_view name);
  /// The same per step, for a summary and for --metrics: "forward 1.14, backward 1.55" in
  /// milliseconds, {"forward": 0.00114, ...} in seconds.
  std::string milliseconds_text(int64_t steps);
  nlohmann::json seconds_json(int64_t steps);
  /// Forgets all times so far. Settles.
  void restart();

 private:
  struct Mark {
    const char* phase;  // the phase that ends here; nullptr: a series starts
    TimedEvent event;
  };
  void take_first();

  Stream stream_;
  bool running_ = false;
  std::deque<Mark> marks_;
  std::vector<std::pair<std::string, double>> totals_;
};

}  // namespace lockstep
