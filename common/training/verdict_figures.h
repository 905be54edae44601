#pragma once
// The figures that a verdict is based on: how far two weights files are apart, how fast two runs
// were.

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace lockstep {

/// |w - w_ref| / |w_ref| of two weights files, all parameters as one vector, in float64. Running
/// statistics are not parameters. Not finite if a weight is not, or if w_ref is 0. Throws BadInput
/// unless both files have parameters of the same names and shapes.
double weights_distance(const std::string& path, const std::string& reference);

/// |dw - dw_ref| / |dw_ref|, where dw is the change from the weights in `initial`; else as above.
double change_distance(const std::string& path, const std::string& reference,
                       const std::string& initial);

/// The speed of a run that is warm: its first tenth of steps (at least one) does not count.
struct WarmSpeed {
  double step_seconds = 0;        // median
  double samples_per_second = 0;  // of full batches, at that time per step
};

/// Reads the speed from a run's metrics (TrainingLog); `what` names them in errors. Throws BadInput
/// for fewer than two steps, and where a figure is missing or makes no sense.
WarmSpeed warm_speed(const nlohmann::json& metrics, const std::string& what);

struct SpeedUp {
  double factor = 0;      // reference time / own time
  double efficiency = 0;  // factor / devices
};
SpeedUp speed_up(const WarmSpeed& own, const WarmSpeed& reference, size_t devices);

}  // namespace lockstep
