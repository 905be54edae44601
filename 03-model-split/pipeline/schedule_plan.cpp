#include "03-model-split/pipeline/schedule_plan.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "03-model-split/pipeline/timetable.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

using Kind = Instruction::Kind;
constexpr double kForward = 1, kBackward = 2;  // it does about twice the work

/// A forward or backward, and whose.
struct DeviceSlot {
  int device;
  Slot slot;
};

/// The slots of all devices, each after those that it depends on.
std::vector<DeviceSlot> in_order_of_time(const Timetable& table) {
  std::vector<DeviceSlot> all;
  for (size_t device = 0; device < table.devices.size(); ++device) {
    for (const Slot& slot : table.devices[device]) all.push_back({int(device), slot});
  }
  std::stable_sort(all.begin(), all.end(), [](const DeviceSlot& a, const DeviceSlot& b) {
    return a.slot.begin < b.slot.begin;
  });
  return all;
}

std::string words_of(const Instruction& instruction, int chunks) {
  return fmt::format("{} of micro-batch {}", name_of(instruction.kind), instruction.micro_batch) +
         (chunks == 1 ? "" : fmt::format(" through chunk {}", instruction.chunk));
}

}  // namespace

Plan plan_of(ScheduleKind kind, int devices, int micro_batches, int chunks) {
  const int p = devices, m = micro_batches;
  const Timetable table = simulate(make_schedules(kind, p, m, chunks), kForward, kBackward);
  std::vector<PlannedLane> lanes;
  for (int device = 0; device < p; ++device) {
    lanes.push_back({row_name(device, chunks), double(predicted_live(kind, p, m, device, chunks))});
  }
  Plan plan(fmt::format("{}: {}", name_of(kind), pipeline_text(p, m, chunks)), "forwards",
            "live activations", lanes);
  std::map<std::tuple<Kind, int, int>, size_t> places;  // of kind, stage and micro-batch
  for (const auto& [device, slot] : in_order_of_time(table)) {
    const auto& [what, i, chunk] = slot.instruction;
    const bool forward = what == Kind::forward;
    const int stage = chunk * p + device;
    std::vector<size_t> after;
    if (!forward) after.push_back(places.at({Kind::forward, stage, i}));
    const auto neighbour = places.find({what, forward ? stage - 1 : stage + 1, i});
    if (neighbour != places.end()) after.push_back(neighbour->second);
    places[{what, stage, i}] = plan.add({.lane = size_t(device),
                                         .name = label_of(slot.instruction, chunks),
                                         .kind = name_of(what),
                                         .text = words_of(slot.instruction, chunks),
                                         .length = slot.end - slot.begin,
                                         .after = after,
                                         .takes = forward ? 1.0 : 0.0,
                                         .gives = forward ? 0.0 : 1.0});
  }
  plan.set_note("F0: forward of micro-batch 0, B0: its backward, which takes two forwards.");
  plan.set_formula(
      {fmt::format("bubble {} = {}/{}", bubble_formula(chunks), p - 1, chunks * m + p - 1),
       predicted_bubble(p, m, chunks)});
  return plan;
}

}  // namespace lockstep
