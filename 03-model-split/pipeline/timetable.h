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

/// The outcome when all devices follow their instructions, each forward and backward of a stage
/// takes its time, and sends and receives take none.
struct Timetable {
  std::vector<std::vector<Slot>> devices;  // in order of time
  std::vector<int> live;  // per device: the most activations between forward and end of backward
  double makespan = 0;    // to the end of the last backward
  /// Share of the devices' time in which they do nothing.
  double bubble() const;
};

/// Plays the instructions. Throws BadInput, naming every stage that is stuck and its instruction,
/// if they block each other. A send waits for a place, as it does in a Channel. There are
/// kGradientPlaces for gradients, and for activations as many as may be alive in the sender; the
/// receiving stage's backward, or the send of what it made, empties the oldest one. With
/// `blocking_sends` there are none: a send waits until the receiver has come to its receive.
Timetable simulate(const std::vector<Instructions>& schedules, double forward_time,
                   double backward_time, bool blocking_sends = false);

/// What a pipeline is called in headings: "4 stages, 8 micro-batches".
std::string pipeline_text(int devices, int micro_batches, int chunks);
/// "stage 0", or where a device has several: "device 0".
std::string row_name(int device, int chunks);
/// "F3" or "B3", forward or backward of micro-batch 3; with several chunks "F3.1", that of chunk 1.
std::string label_of(const Instruction& instruction, int chunks);

/// The timetable as text: a row per device, a column per unit of time. A forward takes one unit, a
/// backward two, as it does about twice the work.
std::string draw(ScheduleKind kind, int devices, int micro_batches, int chunks = 1);

}  // namespace lockstep
