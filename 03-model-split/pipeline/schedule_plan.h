#pragma once
// A pipeline's schedule as a plan, for `lockstep show`: the instructions of schedule.cpp, played.

#include "03-model-split/pipeline/schedule.h"
#include "common/training/plan.h"

namespace lockstep {

/// A lane per device; its bars are F0, B0 and so on, with several chunks F0.0, F0.1, its count the
/// live activations. A forward of a stage takes one unit, a backward two. Throws BadInput for a
/// schedule that cannot be.
Plan plan_of(ScheduleKind kind, int devices, int micro_batches, int chunks = 1);

}  // namespace lockstep
