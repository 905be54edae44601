#include "03-model-split/pipeline/schedule.h"

#include <algorithm>
#include <cmath>

#include "common/core/error.h"
#include "common/core/listed.h"

namespace lockstep {
namespace {

using Kind = Instruction::Kind;

/// Writes down one stage's instructions. The first stage receives no activations and sends no
/// gradients, the last the other way round.
class StageWriter {
 public:
  StageWriter(int stage, int stages) : first_(stage == 0), last_(stage == stages - 1) {}

  void receive_activation(int micro_batch) {
    if (!first_) list_.push_back({Kind::receive_activation, micro_batch});
  }
  void forward(int micro_batch) {
    list_.push_back({Kind::forward, micro_batch});
    if (!last_) list_.push_back({Kind::send_activation, micro_batch});
  }
  void backward(int micro_batch) {
    if (!last_) list_.push_back({Kind::receive_gradient, micro_batch});
    list_.push_back({Kind::backward, micro_batch});
  }
  void send_gradient(int micro_batch) {
    if (!first_) list_.push_back({Kind::send_gradient, micro_batch});
  }
  Instructions finish() {
    list_.push_back({Kind::step});
    return std::move(list_);
  }

 private:
  bool first_, last_;
  Instructions list_;
};

}  // namespace

ScheduleKind parse_schedule(const std::string& text) {
  for (const ScheduleKind kind :
       {ScheduleKind::naive, ScheduleKind::gpipe, ScheduleKind::one_f1b}) {
    if (text == name_of(kind)) return kind;
  }
  fail<BadInput>("--schedule: '{}', expected naive, gpipe or 1f1b", text);
}

std::string name_of(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::naive:
      return "naive";
    case ScheduleKind::gpipe:
      return "gpipe";
    case ScheduleKind::one_f1b:
      return "1f1b";
  }
  return "?";
}

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

Instructions make_schedule(ScheduleKind kind, int stages, int micro_batches, int stage) {
  require(stages > 0, "schedule: {} stages, expected 1 or more", stages);
  require(micro_batches > 0, "schedule: {} micro-batches, expected 1 or more", micro_batches);
  require(0 <= stage && stage < stages, "schedule: stage {} of {}, expected 0 to {}", stage, stages,
          stages - 1);
  require(kind != ScheduleKind::naive || micro_batches == 1,
          "schedule: the naive one has 1 micro-batch, found {}; choose gpipe or 1f1b",
          micro_batches);
  return kind == ScheduleKind::one_f1b ? one_f1b_schedule(stages, micro_batches, stage)
                                       : gpipe_schedule(stages, micro_batches, stage);
}

std::vector<Instructions> make_schedules(ScheduleKind kind, int stages, int micro_batches) {
  std::vector<Instructions> all;
  for (int stage = 0; stage < stages; ++stage) {
    all.push_back(make_schedule(kind, stages, micro_batches, stage));
  }
  return all;
}

void require_finished(const std::vector<Instructions>& schedules, const std::vector<size_t>& next) {
  std::vector<std::string> stuck;
  for (size_t stage = 0; stage < schedules.size(); ++stage) {
    if (next[stage] == schedules[stage].size()) continue;
    const Instruction& at = schedules[stage][next[stage]];
    stuck.push_back(fmt::format("stage {} at '{} {}'", stage, name_of(at.kind), at.micro_batch));
  }
  require(stuck.empty(), "schedule: deadlock, no stage can go on: {}; expected all to finish",
          listed(stuck));
}

double predicted_bubble(int stages, int micro_batches) {
  return double(stages - 1) / double(micro_batches + stages - 1);
}

int predicted_live(ScheduleKind kind, int stages, int micro_batches, int stage) {
  return kind == ScheduleKind::one_f1b ? std::min(stages - stage, micro_batches) : micro_batches;
}

}  // namespace lockstep
