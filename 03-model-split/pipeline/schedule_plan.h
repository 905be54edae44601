#pragma once
// A pipeline's schedule as a plan, for `lockstep show`: the instructions of schedule.cpp, played.

#include "03-model-split/pipeline/schedule.h"
#include "common/app/plan.h"

namespace lockstep {

/// A lane per stage; its bars are F0, B0 and so on, its count the live activations. A forward takes
/// one unit, a backward two. Throws BadInput for a schedule that cannot be.
Plan plan_of(ScheduleKind kind, int stages, int micro_batches);

}  // namespace lockstep
