#include "03-model-split/pipeline/timetable.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace lockstep {
namespace {

using Kind = Instruction::Kind;

class Simulation {
 public:
  Simulation(const std::vector<Instructions>& schedules, double forward_time, double backward_time,
             bool blocking_sends)
      : schedules_(schedules),
        forward_time_(forward_time),
        backward_time_(backward_time),
        blocking_sends_(blocking_sends),
        next_(schedules.size()),
        clock_(schedules.size()),
        sent_(schedules.size()),
        alive_(schedules.size()) {
    table_.stages.resize(schedules.size());
    table_.live.resize(schedules.size());
  }

  Timetable run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (size_t stage = 0; stage < schedules_.size(); ++stage) {
        while (advance(stage)) moved = true;
      }
    }
    require_finished(schedules_, next_);
    return std::move(table_);
  }

 private:
  /// A message under way: the sender's clock when it was sent.
  struct Message {
    Instruction::Kind receive;
    int micro_batch;
    double time;
  };

  const Instruction* upcoming(size_t stage) const {
    return next_[stage] < schedules_[stage].size() ? &schedules_[stage][next_[stage]] : nullptr;
  }

  /// Executes the stage's next instruction, if nothing is in its way.
  bool advance(size_t stage) {
    const Instruction* next = upcoming(stage);
    if (next == nullptr) return false;
    switch (next->kind) {
      case Kind::forward:
      case Kind::backward:
        work(stage, *next);
        break;
      case Kind::send_activation:
        if (!send(stage, stage + 1, {Kind::receive_activation, next->micro_batch})) return false;
        break;
      case Kind::send_gradient:
        if (!send(stage, stage - 1, {Kind::receive_gradient, next->micro_batch})) return false;
        break;
      case Kind::receive_activation:
      case Kind::receive_gradient:
        if (!receive(stage, *next)) return false;
        break;
      case Kind::step:
        break;
    }
    ++next_[stage];
    return true;
  }

  void work(size_t stage, const Instruction& instruction) {
    const bool forward = instruction.kind == Kind::forward;
    if (forward) table_.live[stage] = std::max(table_.live[stage], ++alive_[stage]);
    const double begin = clock_[stage];
    clock_[stage] += forward ? forward_time_ : backward_time_;
    table_.stages[stage].push_back({instruction, begin, clock_[stage]});
    table_.makespan = std::max(table_.makespan, clock_[stage]);
    if (!forward) --alive_[stage];
  }

  bool send(size_t stage, size_t to, const Instruction& receive) {
    if (blocking_sends_) {
      const Instruction* theirs = upcoming(to);
      if (theirs == nullptr || !(*theirs == receive)) return false;
      clock_[stage] = std::max(clock_[stage], clock_[to]);
    }
    sent_[to].push_back({receive.kind, receive.micro_batch, clock_[stage]});
    return true;
  }

  bool receive(size_t stage, const Instruction& instruction) {
    const auto message =
        std::find_if(sent_[stage].begin(), sent_[stage].end(), [&](const Message& sent) {
          return sent.receive == instruction.kind && sent.micro_batch == instruction.micro_batch;
        });
    if (message == sent_[stage].end()) return false;
    clock_[stage] = std::max(clock_[stage], message->time);
    sent_[stage].erase(message);
    return true;
  }

  const std::vector<Instructions>& schedules_;
  double forward_time_, backward_time_;
  bool blocking_sends_;
  std::vector<size_t> next_;                // per stage: the current instruction
  std::vector<double> clock_;               // per stage: when that can begin
  std::vector<std::vector<Message>> sent_;  // per receiver
  std::vector<int> alive_;
  Timetable table_;
};

}  // namespace

Timetable simulate(const std::vector<Instructions>& schedules, double forward_time,
                   double backward_time, bool blocking_sends) {
  return Simulation(schedules, forward_time, backward_time, blocking_sends).run();
}

double Timetable::bubble() const {
  double busy = 0;
  for (const std::vector<Slot>& stage : stages) {
    for (const Slot& slot : stage) busy += slot.end - slot.begin;
  }
  return 1 - busy / (makespan * double(stages.size()));
}

// --- Drawing -------------------------------------------------------------------------------------

std::string draw(ScheduleKind kind, int stages, int micro_batches) {
  constexpr double kForward = 1, kBackward = 2;
  const Timetable table =
      simulate(make_schedules(kind, stages, micro_batches), kForward, kBackward);
  const size_t cell = fmt::format("{}", micro_batches - 1).size() + 2;  // "B12 "
  std::string text = fmt::format("{}, {} stages, {} micro-batch{}\n", name_of(kind), stages,
                                 micro_batches, micro_batches == 1 ? "" : "es");
  for (int stage = 0; stage < stages; ++stage) {
    std::string row(size_t(std::lround(table.makespan)) * cell, ' ');
    for (size_t time = 0; time < row.size(); time += cell) row[time] = '.';
    for (const Slot& slot : table.stages[stage]) {
      const bool forward = slot.instruction.kind == Kind::forward;
      const std::string label =
          fmt::format("{}{}", forward ? 'F' : 'B', slot.instruction.micro_batch);
      const size_t begin = size_t(std::lround(slot.begin)) * cell;
      const size_t length = size_t(std::lround(slot.end - slot.begin)) * cell - 1;
      row.replace(begin, length, label + std::string(length - label.size(), forward ? ' ' : '-'));
    }
    text += fmt::format("stage {}  {}\n", stage, row.substr(0, row.find_last_not_of(' ') + 1));
  }
  text += fmt::format("bubble {:.1f} % of the time, (p-1)/(m+p-1) = {:.1f} %; live activations",
                      100 * table.bubble(), 100 * predicted_bubble(stages, micro_batches));
  for (const int live : table.live) text += fmt::format(" {}", live);
  return text + "\n";
}

}  // namespace lockstep
