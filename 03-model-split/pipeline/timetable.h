#pragma once
// A schedule turned into a timetable: played without a device, and drawn.

#include <string>
#include <vector>

#include "03-model-split/pipeline/schedule.h"

namespace lockstep {

/// One forward or backward of a timetable.
struct Slot {
  Instruction instruction;
  double begin, end;
};

/// The outcome when all stages follow their instructions, each forward and backward takes its time,
/// and sends and receives take none.
struct Timetable {
  std::vector<std::vector<Slot>> stages;  // in order of time
  std::vector<int> live;  // per stage: the most micro-batches between forward and end of backward
  double makespan = 0;    // to the end of the last backward
  /// Share of the stages' time in which they do nothing.
  double bubble() const;
};

/// Plays the instructions. Throws BadInput, naming every stage that is stuck and its instruction,
/// if they block each other; with `blocking_sends` a send waits until the receiver has come to its
/// receive, as a transfer without a buffer does.
Timetable simulate(const std::vector<Instructions>& schedules, double forward_time,
                   double backward_time, bool blocking_sends = false);

/// The timetable as text: a row per stage, a column per unit of time; F3 and B3 are forward and
/// backward of micro-batch 3. A backward takes two units, as it does about twice the work.
std::string draw(ScheduleKind kind, int stages, int micro_batches);

}  // namespace lockstep
