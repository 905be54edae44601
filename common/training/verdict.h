#pragma once
// --baseline: a speed-up is shown only where the result is right. And the figures that this is
// based on: how far two weights files are apart, how fast two runs were.

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "common/options/options.h"

namespace lockstep {

/// Compares this program with the reference (`info.baseline`), which the build puts next to it, by
/// running both as children and looking at their files. This process must have no threads and no
/// devices yet.
///
/// 1. Proof, untimed: both train from the same weights on the same order at learning rate 0.01
///    without momentum, schedules and weight decay. Their weights must agree after 10 steps, to a
///    relative L2 of 1e-5. One rounding already moves ResNet-18's weights by more than that. So
///    for ResNet-18 the change of the weights in one step must agree, to 10 %. If this program
///    normalises parts of the batch (`info.emulate`), the program `reference` next to the
///    reference does so, too.
///    Under Adam and AdamW both train with that optimizer, at rate 1e-4, with eps 1e-3, weight
///    decay 0.01 and the default betas. Adam moves a weight whose gradient is rounding noise by a
///    whole step of random sign, unless eps is larger than the noise. The changes that follow were
///    measured over 10 steps of 64 samples and four seeds. Another order of sums (stages 02 and 04)
///    moves the seed network by at most 7.3e-9 and its BatchNorm variant (stage 02) by 1.1e-8.
///    Float instead of double moves both by 1.9e-7. With eps 1e-8 at rate 1e-3 that is 8e-6 and
///    1.7e-3; with eps 1e-3 at rate 0.01, 4.0e-4.
/// 2. Timed, with the options as given: the reference, then this program with the user's
///    --metrics, --save and --trace, whose output is shown as always.
/// 3. Prints both speeds, speed-up and efficiency (speed-up / devices), and adds them to --metrics:
///    "speedup", "efficiency", and all figures under "baseline".
///
/// Returns the exit status: 0, or that of this program's own timed run, which has then printed why.
/// Throws if the weights disagree or a child's file cannot be used (status 1). The same if another
/// child fails (its own status and error line), or if the reference is missing.
int run_with_baseline(const ProgramInfo& info, const CommandLine& line);

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
