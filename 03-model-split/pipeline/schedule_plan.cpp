#include "03-model-split/pipeline/schedule_plan.h"

#include <algorithm>
#include <map>

#include "03-model-split/pipeline/timetable.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

using Kind = Instruction::Kind;
constexpr double kForward = 1, kBackward = 2;  // it does about twice the work

/// A forward or backward, and whose.
struct StageSlot {
  int stage;
  Slot slot;
};

/// The slots of all stages, each after those that it depends on.
std::vector<StageSlot> in_order_of_time(const Timetable& table) {
  std::vector<StageSlot> all;
  for (size_t stage = 0; stage < table.stages.size(); ++stage) {
    for (const Slot& slot : table.stages[stage]) all.push_back({int(stage), slot});
  }
  std::stable_sort(all.begin(), all.end(), [](const StageSlot& a, const StageSlot& b) {
    return a.slot.begin < b.slot.begin;
  });
  return all;
}

}  // namespace

Plan plan_of(ScheduleKind kind, int stages, int micro_batches) {
  const int p = stages, m = micro_batches;
  const Timetable table = simulate(make_schedules(kind, p, m), kForward, kBackward);
  std::vector<PlannedLane> lanes;
  for (int stage = 0; stage < p; ++stage) {
    lanes.push_back({"stage " + std::to_string(stage), double(predicted_live(kind, p, m, stage))});
  }
  Plan plan(fmt::format("{}: {} stages, {} micro-batch{}", name_of(kind), p, m, m == 1 ? "" : "es"),
            "forwards", "live activations", lanes);
  std::map<std::tuple<Kind, int, int>, size_t> places;  // of kind, stage and micro-batch
  for (const auto& [stage, slot] : in_order_of_time(table)) {
    const int i = slot.instruction.micro_batch;
    const bool forward = slot.instruction.kind == Kind::forward;
    std::vector<size_t> after;
    if (!forward) after.push_back(places.at({Kind::forward, stage, i}));
    const auto neighbour = places.find({slot.instruction.kind, forward ? stage - 1 : stage + 1, i});
    if (neighbour != places.end()) after.push_back(neighbour->second);
    places[{slot.instruction.kind, stage, i}] =
        plan.add({.lane = size_t(stage),
                  .name = fmt::format("{}{}", forward ? 'F' : 'B', i),
                  .kind = name_of(slot.instruction.kind),
                  .text = fmt::format("{} of micro-batch {}", name_of(slot.instruction.kind), i),
                  .length = slot.end - slot.begin,
                  .after = after,
                  .takes = forward ? 1.0 : 0.0,
                  .gives = forward ? 0.0 : 1.0});
  }
  plan.set_note("F0: forward of micro-batch 0, B0: its backward, which takes two forwards.");
  plan.set_formula(
      {fmt::format("bubble (p-1)/(m+p-1) = {}/{}", p - 1, m + p - 1), predicted_bubble(p, m)});
  return plan;
}

}  // namespace lockstep
