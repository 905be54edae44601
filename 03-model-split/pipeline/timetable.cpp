#include "03-model-split/pipeline/timetable.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

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
        under_way_(schedules.size()),
        alive_(schedules.size()) {
    table_.devices.resize(schedules.size());
    table_.live.resize(schedules.size());
  }

  Timetable run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (size_t device = 0; device < schedules_.size(); ++device) {
        while (advance(device)) moved = true;
      }
    }
    require_finished(schedules_, next_);
    return std::move(table_);
  }

 private:
  /// A message under way: the sender's clock when it was sent.
  struct Message {
    Instruction receive;
    double time;
  };

  const Instruction* upcoming(size_t device) const {
    return next_[device] < schedules_[device].size() ? &schedules_[device][next_[device]] : nullptr;
  }

  /// Executes the device's next instruction, if nothing is in its way.
  bool advance(size_t device) {
    const Instruction* next = upcoming(device);
    if (next == nullptr) return false;
    switch (next->kind) {
      case Kind::forward:
      case Kind::backward:
        work(device, *next);
        break;
      case Kind::send_activation:
        if (!send(device, *next, Kind::receive_activation)) return false;
        break;
      case Kind::send_gradient:
        if (!send(device, *next, Kind::receive_gradient)) return false;
        break;
      case Kind::receive_activation:
      case Kind::receive_gradient:
        if (!receive(device, *next)) return false;
        break;
      case Kind::step:
        break;
    }
    ++next_[device];
    return true;
  }

  int stage_of(size_t device, const Instruction& instruction) const {
    return instruction.chunk * int(schedules_.size()) + int(device);
  }

  void work(size_t device, const Instruction& instruction) {
    const bool forward = instruction.kind == Kind::forward;
    if (forward) table_.live[device] = std::max(table_.live[device], ++alive_[device]);
    const double begin = clock_[device];
    clock_[device] += forward ? forward_time_ : backward_time_;
    table_.devices[device].push_back({instruction, begin, clock_[device]});
    table_.makespan = std::max(table_.makespan, clock_[device]);
    if (forward) return;
    --alive_[device];
    const int stage = stage_of(device, instruction);
    emptied_[{Kind::send_activation, stage}].push_back(clock_[device]);
    if (stage == 0) emptied_[{Kind::send_gradient, stage}].push_back(clock_[device]);
  }

  bool send(size_t device, const Instruction& instruction, Kind kind) {
    const int devices = int(schedules_.size());
    const int to = stage_of(device, instruction) + (kind == Kind::receive_activation ? 1 : -1);
    const Instruction receive{kind, instruction.micro_batch, to / devices};
    const size_t receiver = size_t(to % devices);
    if (blocking_sends_) {
      const Instruction* theirs = upcoming(receiver);
      if (theirs == nullptr || !(*theirs == receive)) return false;
      clock_[device] = std::max(clock_[device], clock_[receiver]);
    } else if (!find_place(device, instruction, to)) {
      return false;
    }
    under_way_[receiver].push_back({receive, clock_[device]});
    if (kind == Kind::receive_gradient) {
      emptied_[{instruction.kind, to + 1}].push_back(clock_[device]);
    }
    return true;
  }

  /// Waits until the stage that receives has emptied a place; returns whether it will have.
  bool find_place(size_t device, const Instruction& instruction, int to) {
    const bool activation = instruction.kind == Kind::send_activation;
    const int places =
        activation ? most_live(schedules_[device], instruction.chunk) : kGradientPlaces;
    int& sent = sent_[{instruction.kind, to}];
    const std::vector<double>& emptied = emptied_[{instruction.kind, to}];
    if (sent >= places) {
      if (size_t(sent - places) >= emptied.size()) return false;
      clock_[device] = std::max(clock_[device], emptied[size_t(sent - places)]);
    }
    ++sent;
    return true;
  }

  bool receive(size_t device, const Instruction& instruction) {
    std::vector<Message>& mine = under_way_[device];
    const auto message = std::find_if(
        mine.begin(), mine.end(), [&](const Message& sent) { return sent.receive == instruction; });
    if (message == mine.end()) return false;
    clock_[device] = std::max(clock_[device], message->time);
    mine.erase(message);
    return true;
  }

  const std::vector<Instructions>& schedules_;
  double forward_time_, backward_time_;
  bool blocking_sends_;
  std::vector<size_t> next_;                     // per device: the current instruction
  std::vector<double> clock_;                    // per device: when that can begin
  std::vector<std::vector<Message>> under_way_;  // per receiving device
  // Per kind of send and receiving stage: how many were sent, and when places became free.
  std::map<std::pair<Kind, int>, int> sent_;
  std::map<std::pair<Kind, int>, std::vector<double>> emptied_;
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
  for (const std::vector<Slot>& device : devices) {
    for (const Slot& slot : device) busy += slot.end - slot.begin;
  }
  return 1 - busy / (makespan * double(devices.size()));
}

// --- Drawing -------------------------------------------------------------------------------------

std::string pipeline_text(int devices, int micro_batches, int chunks) {
  const std::string stages = chunks == 1 ? fmt::format("{} stages", devices)
                                         : fmt::format("{} devices of {} chunks", devices, chunks);
  return fmt::format("{}, {} micro-batch{}", stages, micro_batches, micro_batches == 1 ? "" : "es");
}

std::string row_name(int device, int chunks) {
  return fmt::format("{} {}", chunks == 1 ? "stage" : "device", device);
}

std::string label_of(const Instruction& instruction, int chunks) {
  const char letter = instruction.kind == Kind::forward ? 'F' : 'B';
  return chunks == 1 ? fmt::format("{}{}", letter, instruction.micro_batch)
                     : fmt::format("{}{}.{}", letter, instruction.micro_batch, instruction.chunk);
}

std::string draw(ScheduleKind kind, int devices, int micro_batches, int chunks) {
  constexpr double kForward = 1, kBackward = 2;
  const Timetable table =
      simulate(make_schedules(kind, devices, micro_batches, chunks), kForward, kBackward);
  const Instruction longest{Kind::backward, micro_batches - 1, chunks - 1};
  const size_t cell = label_of(longest, chunks).size() + 1;  // "B12 "
  std::string text =
      fmt::format("{}, {}\n", name_of(kind), pipeline_text(devices, micro_batches, chunks));
  for (int device = 0; device < devices; ++device) {
    std::string row(size_t(std::lround(table.makespan)) * cell, ' ');
    for (size_t time = 0; time < row.size(); time += cell) row[time] = '.';
    for (const Slot& slot : table.devices[device]) {
      const bool forward = slot.instruction.kind == Kind::forward;
      const std::string label = label_of(slot.instruction, chunks);
      const size_t begin = size_t(std::lround(slot.begin)) * cell;
      const size_t length = size_t(std::lround(slot.end - slot.begin)) * cell - 1;
      row.replace(begin, length, label + std::string(length - label.size(), forward ? ' ' : '-'));
    }
    text += fmt::format("{}  {}\n", row_name(device, chunks),
                        row.substr(0, row.find_last_not_of(' ') + 1));
  }
  text += fmt::format("bubble {:.1f} % of the time, {} = {:.1f} %; live activations",
                      100 * table.bubble(), bubble_formula(chunks),
                      100 * predicted_bubble(devices, micro_batches, chunks));
  for (const int live : table.live) text += fmt::format(" {}", live);
  return text + "\n";
}

}  // namespace lockstep
