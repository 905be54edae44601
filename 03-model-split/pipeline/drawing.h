#pragma once
// A schedule drawn: as text, for --print-schedule, and as a plan that `lockstep show` plays.

#include <string>

#include "03-model-split/pipeline/schedule.h"
#include "common/training/plan.h"

namespace lockstep {

/// The timetable as text: a row per device, a column per unit of time. A forward takes one unit, a
/// backward two, as it does about twice the work.
std::string draw(ScheduleKind kind, int devices, int micro_batches, int chunks = 1);

/// The same as a plan: a lane per device; its bars are F0, B0 and so on, with several chunks F0.0,
/// F0.1, its count the live activations. Throws BadInput for a schedule that cannot be.
Plan plan_of(ScheduleKind kind, int devices, int micro_batches, int chunks = 1);

}  // namespace lockstep
