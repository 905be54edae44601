#pragma once
// When each device of a pipeline does what: lists of instructions, without memory or numbers, and
// the timetable of a run that follows them.
//
// A device holds one stage of the network or, in the interleaved schedule, several: its chunks.
// With p devices, chunk v of device d is stage v p + d. Where each device has one stage, stage and
// device have the same number.

#include <array>
#include <string>
#include <vector>

#include "common/core/parse.h"

namespace lockstep {

/// How the micro-batches of one batch are ordered.
enum class ScheduleKind {
  naive,    // one micro-batch: only one stage works at a time
  gpipe,    // all forwards, then all backwards (Huang et al., arXiv 1811.06965)
  one_f1b,  // a backward as soon as there is one (PipeDream-Flush, arXiv 2006.09503, section 2.2)
  interleaved  // 1F1B with several stages on a device (Megatron-LM, arXiv 2104.04473, section 2.2)
};
constexpr auto words_of(ScheduleKind) {
  return std::array{"naive", "gpipe", "1f1b", "interleaved"};
}

/// One thing that a device does for one of its stages. A stage sends to its neighbours and receives
/// from them: activations go to the next stage, gradients to the previous stage.
struct Instruction {
  enum class Kind {
    receive_activation,
    forward,
    send_activation,
    receive_gradient,
    backward,
    send_gradient,
    step  // the optimizer's: the gradients of all micro-batches are there
  };
  Kind kind;
  int micro_batch = 0;  // 0, 1, ...; 0 for a step
  int chunk = 0;        // which of the device's stages

  friend bool operator==(const Instruction&, const Instruction&) = default;
};
std::string name_of(Instruction::Kind kind);
/// "F3" or "B3", forward or backward of micro-batch 3; with several chunks "F3.1", that of chunk 1.
std::string label_of(const Instruction& instruction, int chunks);

using Instructions = std::vector<Instruction>;

/// The instructions of stage `stage` of `stages` for one batch in GPipe. All micro-batches go
/// forward, in order, then all go backward in the same order, then comes the step. A stage receives
/// the input of a pass right before the pass and sends the result right after it. The first stage
/// receives no activations and sends no gradients; the last stage does the reverse. StageWriter
/// (schedule.cpp) adds these messages in GPipe, 1F1B and the interleaved schedule.
Instructions gpipe_schedule(int stages, int micro_batches, int stage);
/// The same in 1F1B: min(stages - stage, micro_batches) forwards, then a backward and a forward in
/// turn until nothing is left. Sends and receives have an order in which no stage waits forever,
/// even if every send lasts until its receiver has come to the receive.
Instructions one_f1b_schedule(int stages, int micro_batches, int stage);
/// The instructions of device `device` of `devices` in interleaved 1F1B, with `chunks` stages each.
/// `micro_batches` is a multiple of `devices`.
///
/// Forwards have this order: micro-batches 0 to devices - 1 through chunk 0, the same through chunk
/// 1, and so on to the last chunk. Then come the next `devices` micro-batches, again from chunk 0.
/// The order of backwards is the same, but from the last chunk to chunk 0. First there are 2
/// (devices - 1 - device) + (chunks - 1) devices forwards, or all if that is less. Then come a
/// forward and a backward in turn, then the backwards that are left, and the step. A stage receives
/// the input of a pass right before the pass and sends the result right after it. Only the first of
/// all stages receives no activations and sends no gradients, and only the last one sends no
/// activations and receives no gradients.
Instructions interleaved_schedule(int devices, int chunks, int micro_batches, int device);

/// The instructions of device `device` of `devices` for one batch of `micro_batches`, in order. The
/// naive schedule is GPipe's with one micro-batch. Throws BadInput for less than one device or
/// micro-batch, for an unknown device, and for several micro-batches in the naive schedule. Only
/// the interleaved schedule may have several chunks. That schedule throws BadInput for less than
/// two devices or chunks, and for micro-batches that are no multiple of the devices.
Instructions make_schedule(ScheduleKind kind, int devices, int micro_batches, int device,
                           int chunks = 1);
/// The instructions of all devices.
std::vector<Instructions> make_schedules(ScheduleKind kind, int devices, int micro_batches,
                                         int chunks = 1);

/// Throws BadInput, reporting a deadlock, if a device has instructions left: next[device] is its
/// first one not done. Names the stage of every such instruction.
void require_finished(const std::vector<Instructions>& schedules, const std::vector<size_t>& next);

/// (p-1)/(V m + p-1) with V chunks. Each of p devices waits for this share of the whole time, if
/// all stages take equally long (GPipe, section 2.3). As a share of the ideal time: (p-1)/(V m).
double predicted_bubble(int devices, int micro_batches, int chunks = 1);
/// The formula as text: "(p-1)/(m+p-1)", with several chunks "(p-1)/(Vm+p-1)".
std::string bubble_formula(int chunks);
/// The number of activations that device `device` has to keep at the same time. GPipe keeps those
/// of all micro-batches, 1F1B of at most devices - device. In the interleaved schedule each
/// activation belongs to one chunk; there are as many as forwards until the first backward.
int predicted_live(ScheduleKind kind, int devices, int micro_batches, int device, int chunks = 1);
/// The most micro-batches of `chunk` that are between forward and backward at once in the list.
int most_live(const Instructions& list, int chunk);

/// How many gradients may be under way between two stages, or in use: one is read while the next
/// one comes in.
inline constexpr int kGradientPlaces = 2;

/// One forward or backward of a timetable.
struct Slot {
  Instruction instruction;
  double begin, end;
};

/// The outcome when all devices follow their instructions. Each forward and backward of a stage
/// takes its time; sends and receives take no time.
struct Timetable {
  std::vector<std::vector<Slot>> devices;  // in order of time
  std::vector<int> live;  // per device: the most activations between forward and end of backward
  double makespan = 0;    // to the end of the last backward
  /// Share of the devices' time in which they do nothing.
  double bubble() const;
};

/// Plays the instructions. Throws BadInput, naming every stuck stage and its instruction, if
/// devices block each other. A send waits for a free place, as in a Channel. Gradients have
/// kGradientPlaces places; activations have as many as may be alive in the sender. The receiving
/// stage's backward, or the send of its result, empties the oldest place. With `blocking_sends`
/// there are no places: a send waits until the receiver has come to its receive.
Timetable simulate(const std::vector<Instructions>& schedules, double forward_time,
                   double backward_time, bool blocking_sends = false);

/// The timetable as text: a row per device, a column per unit of time. A forward takes one unit, a
/// backward two, as it does about twice the work.
std::string draw(ScheduleKind kind, int devices, int micro_batches, int chunks = 1);

}  // namespace lockstep
