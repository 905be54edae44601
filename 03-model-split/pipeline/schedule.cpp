#include "03-model-split/pipeline/schedule.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "common/core/error.h"
#include "common/core/text.h"

namespace lockstep {
namespace {

using Kind = Instruction::Kind;

/// Writes down one device's instructions. The first of all stages receives no activations and sends
/// no gradients, the last one the other way round.
class StageWriter {
 public:
  StageWriter(int device, int devices, int chunks = 1)
      : device_(device), devices_(devices), chunks_(chunks) {}

  void receive_activation(int micro_batch, int chunk = 0) {
    if (!is_first(chunk)) add(Kind::receive_activation, micro_batch, chunk);
  }
  void forward(int micro_batch, int chunk = 0) {
    add(Kind::forward, micro_batch, chunk);
    if (!is_last(chunk)) add(Kind::send_activation, micro_batch, chunk);
  }
  void backward(int micro_batch, int chunk = 0) {
    if (!is_last(chunk)) add(Kind::receive_gradient, micro_batch, chunk);
    add(Kind::backward, micro_batch, chunk);
  }
  void send_gradient(int micro_batch, int chunk = 0) {
    if (!is_first(chunk)) add(Kind::send_gradient, micro_batch, chunk);
  }
  Instructions finish() {
    list_.push_back({Kind::step});
    return std::move(list_);
  }

 private:
  bool is_first(int chunk) const { return device_ == 0 && chunk == 0; }
  bool is_last(int chunk) const { return device_ == devices_ - 1 && chunk == chunks_ - 1; }
  void add(Kind kind, int micro_batch, int chunk) {
    require(0 <= chunk && chunk < chunks_, "schedule: {} {} of chunk {}, expected chunk 0 to {}",
            name_of(kind), micro_batch, chunk, chunks_ - 1);
    list_.push_back({kind, micro_batch, chunk});
  }

  int device_, devices_, chunks_;
  Instructions list_;
};

}  // namespace

std::string name_of(Kind kind) {
  switch (kind) {
    case Kind::receive_activation:
      return "receive activation";
    case Kind::forward:
      return "forward";
    case Kind::send_activation:
      return "send activation";
    case Kind::receive_gradient:
      return "receive gradient";
    case Kind::backward:
      return "backward";
    case Kind::send_gradient:
      return "send gradient";
    case Kind::step:
      return "step";
  }
  return "?";
}

std::string label_of(const Instruction& instruction, int chunks) {
  const char letter = instruction.kind == Kind::forward ? 'F' : 'B';
  return chunks == 1 ? fmt::format("{}{}", letter, instruction.micro_batch)
                     : fmt::format("{}{}.{}", letter, instruction.micro_batch, instruction.chunk);
}

// --- Schedules -----------------------------------------------------------------------------------

Instructions gpipe_schedule(int stages, int micro_batches, int stage) {
  // [task 03.1] GPipe's schedule
  StageWriter writer(stage, stages);
  for (int i = 0; i < micro_batches; ++i) {
    writer.receive_activation(i);
    writer.forward(i);
  }
  for (int i = 0; i < micro_batches; ++i) {
    writer.backward(i);
    writer.send_gradient(i);
  }
  return writer.finish();
  // [end 03.1]
}

Instructions one_f1b_schedule(int stages, int micro_batches, int stage) {
  // [task 03.2] 1F1B's schedule
  // Forwards before the first backward: just enough to keep this stage and all later ones busy.
  const int warm_up = std::min(stages - stage, micro_batches);
  StageWriter writer(stage, stages);
  for (int i = 0; i < warm_up; ++i) {
    writer.receive_activation(i);
    writer.forward(i);
  }
  for (int i = 0; i < micro_batches; ++i) {
    const int next = warm_up + i;
    writer.backward(i);
    // The next activation comes in before the gradient goes out: the stage before this one sends
    // that activation first and then waits for this gradient. Without buffers both would wait.
    if (next < micro_batches) writer.receive_activation(next);
    writer.send_gradient(i);
    if (next < micro_batches) writer.forward(next);
  }
  return writer.finish();
  // [end 03.2]
}

Instructions interleaved_schedule(int devices, int chunks, int micro_batches, int device) {
  // [task 03.5] interleaved 1F1B
  const int all = chunks * micro_batches;  // forwards, and as many backwards
  // The first micro-batch goes round all devices once per chunk. Then it goes from this device to
  // the last one, and its gradient comes back: two forwards for each device on that way.
  const int warm_up = (chunks - 1) * devices + 2 * (devices - 1 - device);
  const auto micro_batch = [&](int n) { return n / (devices * chunks) * devices + n % devices; };
  const auto chunk = [&](int n) { return n / devices % chunks; };
  StageWriter writer(device, devices, chunks);
  for (int n = 0; n < all + warm_up; ++n) {
    if (n < all) {
      writer.receive_activation(micro_batch(n), chunk(n));
      writer.forward(micro_batch(n), chunk(n));
    }
    if (n < warm_up) continue;
    const int i = micro_batch(n - warm_up), from_the_last = chunks - 1 - chunk(n - warm_up);
    writer.backward(i, from_the_last);
    writer.send_gradient(i, from_the_last);
  }
  return writer.finish();
  // [end 03.5]
}

namespace {

void require_possible(ScheduleKind kind, int devices, int micro_batches, int chunks) {
  require(devices > 0, "schedule: {} stages, expected 1 or more", devices);
  require(micro_batches > 0, "schedule: {} micro-batches, expected 1 or more", micro_batches);
  require(kind != ScheduleKind::naive || micro_batches == 1,
          "schedule: the naive one has 1 micro-batch, found {}; choose gpipe or 1f1b",
          micro_batches);
  if (kind != ScheduleKind::interleaved) {
    require(chunks == 1, "schedule: {} has 1 chunk per device, found {}; choose interleaved",
            name_of(kind), chunks);
    return;
  }
  require(devices > 1 && chunks > 1,
          "schedule: interleaved with {} chunk{} on each of {} device{}, expected 2 or more of "
          "both; choose 1f1b",
          chunks, chunks == 1 ? "" : "s", devices, devices == 1 ? "" : "s");
  require(micro_batches % devices == 0,
          "schedule: interleaved on {} devices with {} micro-batches, expected a multiple of {}; "
          "give --micro-batches {}, or choose 1f1b",
          devices, micro_batches, devices, (micro_batches / devices + 1) * devices);
}

}  // namespace

Instructions make_schedule(ScheduleKind kind, int devices, int micro_batches, int device,
                           int chunks) {
  require_possible(kind, devices, micro_batches, chunks);
  require(0 <= device && device < devices, "schedule: stage {} of {}, expected 0 to {}", device,
          devices, devices - 1);
  switch (kind) {
    case ScheduleKind::one_f1b:
      return one_f1b_schedule(devices, micro_batches, device);
    case ScheduleKind::interleaved:
      return interleaved_schedule(devices, chunks, micro_batches, device);
    default:
      return gpipe_schedule(devices, micro_batches, device);
  }
}

std::vector<Instructions> make_schedules(ScheduleKind kind, int devices, int micro_batches,
                                         int chunks) {
  std::vector<Instructions> all;
  for (int device = 0; device < devices; ++device) {
    all.push_back(make_schedule(kind, devices, micro_batches, device, chunks));
  }
  return all;
}

void require_finished(const std::vector<Instructions>& schedules, const std::vector<size_t>& next) {
  std::vector<std::string> stuck;
  for (size_t device = 0; device < schedules.size(); ++device) {
    if (next[device] == schedules[device].size()) continue;
    const Instruction& at = schedules[device][next[device]];
    stuck.push_back(fmt::format("stage {} at '{} {}'", at.chunk * schedules.size() + device,
                                name_of(at.kind), at.micro_batch));
  }
  require(stuck.empty(), "schedule: deadlock, no stage can go on: {}; expected all to finish",
          listed(stuck));
}

// --- What they cost ------------------------------------------------------------------------------

double predicted_bubble(int devices, int micro_batches, int chunks) {
  return double(devices - 1) / double(chunks * micro_batches + devices - 1);
}

std::string bubble_formula(int chunks) { return chunks == 1 ? "(p-1)/(m+p-1)" : "(p-1)/(Vm+p-1)"; }

int predicted_live(ScheduleKind kind, int devices, int micro_batches, int device, int chunks) {
  const int all = chunks * micro_batches;
  switch (kind) {
    case ScheduleKind::one_f1b:
      return std::min(devices - device, all);
    case ScheduleKind::interleaved:
      return std::min(2 * (devices - 1 - device) + (chunks - 1) * devices + 1, all);
    default:
      return all;
  }
}

int most_live(const Instructions& list, int chunk) {
  int live = 0, most = 0;
  for (const Instruction& i : list) {
    if (i.chunk != chunk) continue;
    if (i.kind == Kind::forward) most = std::max(most, ++live);
    if (i.kind == Kind::backward) --live;
  }
  return most;
}

// --- The timetable -------------------------------------------------------------------------------

namespace {

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

// --- Drawn ---------------------------------------------------------------------------------------

namespace {

constexpr double kForward = 1, kBackward = 2;  // it does about twice the work

/// What a pipeline is called in headings: "4 stages, 8 micro-batches".
std::string pipeline_text(int devices, int micro_batches, int chunks) {
  const std::string stages = chunks == 1 ? fmt::format("{} stages", devices)
                                         : fmt::format("{} devices of {} chunks", devices, chunks);
  return fmt::format("{}, {} micro-batch{}", stages, micro_batches, micro_batches == 1 ? "" : "es");
}

/// "stage 0", or where a device has several: "device 0".
std::string row_name(int device, int chunks) {
  return fmt::format("{} {}", chunks == 1 ? "stage" : "device", device);
}

}  // namespace

std::string draw(ScheduleKind kind, int devices, int micro_batches, int chunks) {
  const Timetable table =
      simulate(make_schedules(kind, devices, micro_batches, chunks), kForward, kBackward);
  const Instruction longest{Instruction::Kind::backward, micro_batches - 1, chunks - 1};
  const size_t cell = label_of(longest, chunks).size() + 1;  // "B12 "
  std::string text =
      fmt::format("{}, {}\n", name_of(kind), pipeline_text(devices, micro_batches, chunks));
  for (int device = 0; device < devices; ++device) {
    std::string row(size_t(std::lround(table.makespan)) * cell, ' ');
    for (size_t time = 0; time < row.size(); time += cell) row[time] = '.';
    for (const Slot& slot : table.devices[device]) {
      const bool forward = slot.instruction.kind == Instruction::Kind::forward;
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
