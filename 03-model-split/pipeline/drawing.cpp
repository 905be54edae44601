#include "03-model-split/pipeline/drawing.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "common/core/error.h"

namespace lockstep {
namespace {

using Kind = Instruction::Kind;

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

std::string draw(ScheduleKind kind, int devices, int micro_batches, int chunks) {
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
