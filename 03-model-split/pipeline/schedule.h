#pragma once
// When each stage of a pipeline does what: lists of instructions, without devices or numbers.

#include <string>
#include <vector>

namespace lockstep {

/// How the micro-batches of one batch are ordered.
enum class ScheduleKind {
  naive,   // one micro-batch: only one stage works at a time
  gpipe,   // all forwards, then all backwards (Huang et al., arXiv 1811.06965)
  one_f1b  // a backward as soon as there is one (PipeDream-Flush, arXiv 2006.09503, section 2.2)
};
/// "naive", "gpipe" or "1f1b"; throws BadInput otherwise.
ScheduleKind parse_schedule(const std::string& text);
std::string name_of(ScheduleKind kind);

/// One thing that a stage does. It sends to, and receives from, its neighbours: activations go to
/// the next stage, gradients to the previous one.
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

  friend bool operator==(const Instruction&, const Instruction&) = default;
};
std::string name_of(Instruction::Kind kind);

using Instructions = std::vector<Instruction>;

/// What stage `stage` of `stages` does for one batch in GPipe: all micro-batches forward, in order,
/// then all of them backward in the same order, then the step. What a forward or backward needs is
/// received right before it, what it made is sent right after it; the first stage receives no
/// activations and sends no gradients, the last the other way round.
Instructions gpipe_schedule(int stages, int micro_batches, int stage);
/// The same in 1F1B: after min(stages - stage, micro_batches) forwards, a backward and a forward in
/// turn until nothing is left. Sends and receives are in an order in which no stage waits forever,
/// even if every send lasts until its receiver has come to the receive.
Instructions one_f1b_schedule(int stages, int micro_batches, int stage);

/// What stage `stage` of `stages` does for one batch of `micro_batches`, in this order; the naive
/// schedule is GPipe's with one micro-batch. Throws BadInput for less than one stage or
/// micro-batch, for a stage that does not exist, and for several micro-batches in the naive
/// schedule.
Instructions make_schedule(ScheduleKind kind, int stages, int micro_batches, int stage);
/// The instructions of all stages.
std::vector<Instructions> make_schedules(ScheduleKind kind, int stages, int micro_batches);

/// Throws BadInput, reporting a deadlock, if a stage has instructions left: next[stage] is its
/// first one not done. Names every such stage.
void require_finished(const std::vector<Instructions>& schedules, const std::vector<size_t>& next);

/// (p-1)/(m+p-1): the share of the whole time that each of p stages waits, if all take equally long
/// (GPipe, section 2.3). Over the ideal time it would be (p-1)/m.
double predicted_bubble(int stages, int micro_batches);
/// The micro-batches whose activations stage `stage` has to keep at the same time: all of them in
/// GPipe, at most stages - stage in 1F1B.
int predicted_live(ScheduleKind kind, int stages, int micro_batches, int stage);

}  // namespace lockstep
