// Schedules of a pipeline: their properties for all sizes, without devices.

#include <algorithm>
#include <map>
#include <tuple>

#include "03-model-split/pipeline/schedule.h"
#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::message_of;
using Kind = Instruction::Kind;

constexpr int kDevices = 8, kChunks = 4;
const int kMicroBatches = testing::full_campaign() ? 32 : 16;
constexpr ScheduleKind kInterleaved = ScheduleKind::interleaved;

/// Calls `check(kind, devices, micro_batches, chunks)` for every schedule up to those sizes.
template <class Check>
void for_all(Check check) {
  for (int devices = 1; devices <= kDevices; ++devices) {
    check(ScheduleKind::naive, devices, 1, 1);
    for (int micro = 1; micro <= kMicroBatches; ++micro) {
      check(ScheduleKind::gpipe, devices, micro, 1);
      check(ScheduleKind::one_f1b, devices, micro, 1);
      if (devices == 1 || micro % devices > 0) continue;
      for (int chunks = 2; chunks <= kChunks; ++chunks) check(kInterleaved, devices, micro, chunks);
    }
  }
}

/// The position of each instruction; fails if one appears twice.
std::map<std::tuple<Kind, int, int>, int> places(const Instructions& list) {
  std::map<std::tuple<Kind, int, int>, int> found;
  for (const Instruction& i : list) {
    const int place = static_cast<int>(found.size());
    REQUIRE(found.emplace(std::tuple(i.kind, i.micro_batch, i.chunk), place).second);
  }
  return found;
}

TEST_CASE("Every stage runs every micro-batch forward once and backward once, in order",
          "[schedule][row44]") {
  for_all([](ScheduleKind kind, int devices, int micro, int chunks) {
    for (int device = 0; device < devices; ++device) {
      const Instructions list = make_schedule(kind, devices, micro, device, chunks);
      const auto at = places(list);
      size_t expected = 1;
      for (int stage = device; stage < devices * chunks; stage += devices) {
        const bool first = stage == 0, last = stage == devices * chunks - 1;
        expected += size_t((2 + (first ? 0 : 2) + (last ? 0 : 2)) * micro);
        for (int i = 0; i < micro; ++i) {
          const auto place = [&](Kind what) { return at.at({what, i, stage / devices}); };
          REQUIRE(place(Kind::forward) < place(Kind::backward));
          if (!first) REQUIRE(place(Kind::receive_activation) < place(Kind::forward));
          if (!last) REQUIRE(place(Kind::forward) < place(Kind::send_activation));
          if (!last) REQUIRE(place(Kind::receive_gradient) < place(Kind::backward));
          if (!first) REQUIRE(place(Kind::backward) < place(Kind::send_gradient));
          if (i == 0) continue;  // first in, first out: running statistics and sums have one order
          for (const Kind what : {Kind::forward, Kind::backward}) {
            REQUIRE(at.at({what, i - 1, stage / devices}) < place(what));
          }
        }
      }
      REQUIRE(list.size() == expected);
      REQUIRE(list.back() == Instruction{Kind::step});
    }
  });
}

/// The micro-batches of a stage's instructions of this kind, in order.
std::vector<int> of_kind(const std::vector<Instructions>& all, int stage, Kind kind) {
  const int devices = static_cast<int>(all.size());
  std::vector<int> micro_batches;
  for (const Instruction& i : all[size_t(stage % devices)]) {
    if (i.kind == kind && i.chunk == stage / devices) micro_batches.push_back(i.micro_batch);
  }
  return micro_batches;
}

TEST_CASE("Neighbours send in the order in which the other receives", "[schedule][row44]") {
  for_all([&](ScheduleKind kind, int devices, int micro, int chunks) {
    const std::vector<Instructions> all = make_schedules(kind, devices, micro, chunks);
    for (int stage = 0; stage + 1 < devices * chunks; ++stage) {
      REQUIRE(of_kind(all, stage, Kind::send_activation) ==
              of_kind(all, stage + 1, Kind::receive_activation));
      REQUIRE(of_kind(all, stage + 1, Kind::send_gradient) ==
              of_kind(all, stage, Kind::receive_gradient));
    }
  });
}

TEST_CASE("A forward begins after the stage before it, a backward after the next stage",
          "[schedule][row44]") {
  for_all([](ScheduleKind kind, int devices, int micro, int chunks) {
    const Timetable table = simulate(make_schedules(kind, devices, micro, chunks), 1, 2);
    std::map<std::tuple<Kind, int, int>, const Slot*> at;  // of kind, stage and micro-batch
    for (int device = 0; device < devices; ++device) {
      for (const Slot& slot : table.devices[size_t(device)]) {
        const auto& [what, i, chunk] = slot.instruction;
        at[{what, chunk * devices + device, i}] = &slot;
      }
    }
    REQUIRE(at.size() == size_t(2 * devices * chunks * micro));
    for (const auto& [key, slot] : at) {
      const auto& [what, stage, i] = key;
      const bool forward = what == Kind::forward;
      if (!forward) REQUIRE(at.at({Kind::forward, stage, i})->end <= slot->begin);
      const auto needed = at.find({what, forward ? stage - 1 : stage + 1, i});
      if (needed != at.end()) REQUIRE(needed->second->end <= slot->begin);
    }
  });
}

TEST_CASE("The makespan and the bubble are those of the formula", "[schedule][row44][row46]") {
  for (const double backward : {1.0, 2.0}) {
    for_all([&](ScheduleKind kind, int devices, int micro, int chunks) {
      // A stage's forward takes 1/V of what a device's takes.
      const Timetable table =
          simulate(make_schedules(kind, devices, micro, chunks), 1.0 / chunks, backward / chunks);
      REQUIRE(table.makespan == Approx((micro + (devices - 1.0) / chunks) * (1 + backward)));
      REQUIRE(table.bubble() ==
              Approx((devices - 1.0) / (chunks * micro + devices - 1)).margin(1e-12));
      REQUIRE(predicted_bubble(devices, micro, chunks) == Approx(table.bubble()).margin(1e-12));
    });
  }
  CHECK(predicted_bubble(4, 8, 1) == Approx(3.0 / 11));
  CHECK(predicted_bubble(4, 8, 2) == Approx(3.0 / 19));
}

TEST_CASE("A device keeps no more activations than the bound", "[schedule][row45]") {
  for_all([](ScheduleKind kind, int devices, int micro, int chunks) {
    const std::vector<Instructions> all = make_schedules(kind, devices, micro, chunks);
    const Timetable table = simulate(all, 1, 2);
    for (int device = 0; device < devices; ++device) {
      int bound = micro;
      if (kind == ScheduleKind::one_f1b) bound = std::min(devices - device, micro);
      if (kind == kInterleaved) {
        bound = std::min(2 * (devices - device) + (chunks - 1) * devices - 1, micro * chunks);
      }
      REQUIRE(table.live[size_t(device)] == bound);
      REQUIRE(predicted_live(kind, devices, micro, device, chunks) == bound);
      int of_chunks = 0;
      for (int chunk = 0; chunk < chunks; ++chunk) {
        of_chunks += most_live(all[size_t(device)], chunk);
      }
      REQUIRE(of_chunks >= bound);  // not all chunks have their most at the same time
      if (chunks == 1) REQUIRE(of_chunks == bound);
    }
  });
  const std::vector<std::vector<int>> of_chunks{{8, 8, 7, 5}, {4, 4, 3, 1}};
  for (int device = 0; device < 4; ++device) {
    const Instructions list = make_schedule(kInterleaved, 4, 8, device, 2);
    for (int chunk = 0; chunk < 2; ++chunk) {
      CHECK(most_live(list, chunk) == of_chunks[size_t(chunk)][size_t(device)]);
    }
  }
}

TEST_CASE("No schedule of one stage per device needs buffers: nobody waits for ever in a send",
          "[schedule][row44]") {
  for_all([](ScheduleKind kind, int devices, int micro, int chunks) {
    const std::vector<Instructions> all = make_schedules(kind, devices, micro, chunks);
    if (chunks == 1) {
      REQUIRE(simulate(all, 1, 1, true).makespan >= simulate(all, 1, 1).makespan - 1e-12);
    } else {  // the devices are a ring, in which each would send first
      REQUIRE_THROWS_AS(simulate(all, 1, 1, true), BadInput);
    }
  });
}

TEST_CASE("A deadlock is found, and every stage in it named", "[schedule][row44]") {
  // The gradient first, then the next activation: without buffers both stages are stuck in a send.
  std::vector<Instructions> all = make_schedules(ScheduleKind::one_f1b, 2, 4);
  const auto gradient =
      std::find(all[1].begin(), all[1].end(), Instruction{Kind::send_gradient, 0});
  REQUIRE(gradient[-1] == Instruction{Kind::receive_activation, 1});
  std::iter_swap(gradient, gradient - 1);
  CHECK(simulate(all, 1, 1).makespan == Approx(10));
  const std::string text = message_of<BadInput>([&] { simulate(all, 1, 1, true); });
  CHECK_THAT(text, ContainsSubstring("deadlock"));
  CHECK_THAT(text, ContainsSubstring("stage 0 at 'send activation 1'"));
  CHECK_THAT(text, ContainsSubstring("stage 1 at 'send gradient 0'"));

  // A stage that waits for something that no stage sends.
  all = make_schedules(ScheduleKind::gpipe, 2, 2);
  std::erase(all[0], Instruction{Kind::send_activation, 1});
  CHECK_THAT(message_of<BadInput>([&] { simulate(all, 1, 1); }),
             ContainsSubstring("stage 1 at 'receive activation 1'"));
}

TEST_CASE("A send waits for a place that the receiver's backward empties", "[schedule]") {
  // Stage 1 sends three gradients; stage 0 has two places for them and goes backward late.
  const auto all = [](std::vector<Kind> first) {
    std::vector<Instructions> lists(2);
    for (const Kind kind : first) lists[0].push_back({kind, 0});
    for (int i = 0; i < 3; ++i) {
      for (const Kind kind : {Kind::backward, Kind::send_gradient}) lists[1].push_back({kind, i});
    }
    lists[1].push_back({Kind::backward, 3});
    return lists;
  };
  // Backwards of 2 to 2, 4, 6; the third gradient goes when stage 0 has ended its own at 2 + 2.
  const Timetable table = simulate(all({Kind::receive_gradient, Kind::backward}), 1, 2);
  CHECK(table.devices[1].back().begin == Approx(6));
  // With forwards before it, that is at 2 + 3 + 2: stage 1 has waited for 1.
  const Timetable late = simulate(
      all({Kind::receive_gradient, Kind::forward, Kind::forward, Kind::forward, Kind::backward}), 1,
      2);
  CHECK(late.devices[1].back().begin == Approx(7));
  // If nothing empties a place there is no third send.
  const std::string text =
      message_of<BadInput>([&] { simulate(all({Kind::receive_gradient}), 1, 2); });
  CHECK_THAT(text, ContainsSubstring("stage 1 at 'send gradient 2'"));
}

TEST_CASE("The timetable is drawn to scale", "[schedule]") {
  CHECK(draw(ScheduleKind::one_f1b, 2, 3) ==
        "1f1b, 2 stages, 3 micro-batches\n"
        "stage 0  F0 F1 .  .  B0--- F2 B1--- .  B2---\n"
        "stage 1  .  F0 B0--- F1 B1--- F2 B2--- .  .\n"
        "bubble 25.0 % of the time, (p-1)/(m+p-1) = 25.0 %; live activations 2 1\n");
  CHECK(draw(ScheduleKind::naive, 2, 1) ==
        "naive, 2 stages, 1 micro-batch\n"
        "stage 0  F0 .  .  .  B0---\n"
        "stage 1  .  F0 B0--- .  .\n"
        "bubble 50.0 % of the time, (p-1)/(m+p-1) = 50.0 %; live activations 1 1\n");
  CHECK(draw(kInterleaved, 2, 2, 2) ==
        "interleaved, 2 devices of 2 chunks, 2 micro-batches\n"
        "device 0  F0.0 F1.0 F0.1 F1.1 .    .    B0.1----- .    B1.1----- B0.0----- B1.0-----\n"
        "device 1  .    F0.0 F1.0 F0.1 B0.1----- F1.1 B1.1----- B0.0----- B1.0----- .    .\n"
        "bubble 20.0 % of the time, (p-1)/(Vm+p-1) = 20.0 %; live activations 4 3\n");
  // As wide as the largest number needs: of ten micro-batches that is 9.
  CHECK_THAT(draw(ScheduleKind::gpipe, 1, 10), ContainsSubstring(" F8 F9 B0--- B1--- "));
  CHECK_THAT(draw(ScheduleKind::gpipe, 1, 11), ContainsSubstring(" F9  F10 B0----- B1----- "));
}

TEST_CASE("Schedules that cannot be are refused", "[schedule]") {
  const auto refused = [](auto... arguments) {
    return message_of<BadInput>([&] { make_schedule(arguments...); });
  };
  CHECK_THAT(refused(ScheduleKind::gpipe, 0, 1, 0), ContainsSubstring("0 stages"));
  CHECK_THAT(refused(ScheduleKind::gpipe, 2, 0, 0), ContainsSubstring("0 micro-batches"));
  CHECK_THAT(refused(ScheduleKind::gpipe, 2, 1, 2), ContainsSubstring("stage 2 of 2"));
  CHECK_THAT(refused(ScheduleKind::naive, 2, 2, 0), ContainsSubstring("gpipe or 1f1b"));
  CHECK_THAT(refused(ScheduleKind::one_f1b, 2, 4, 0, 2),
             ContainsSubstring("1f1b has 1 chunk per device, found 2"));
  CHECK_THAT(refused(kInterleaved, 1, 4, 0, 2), ContainsSubstring("2 chunks on each of 1 device,"));
  CHECK_THAT(refused(kInterleaved, 2, 4, 0, 1), ContainsSubstring("1 chunk on each of 2 devices"));
  CHECK_THAT(refused(kInterleaved, 3, 4, 0, 2),
             ContainsSubstring("3 devices with 4 micro-batches, expected a multiple of 3; give "
                               "--micro-batches 6"));
  CHECK(choice_of<ScheduleKind>("1f1b", "") == ScheduleKind::one_f1b);
  CHECK(choice_of<ScheduleKind>("interleaved", "") == kInterleaved);
}

}  // namespace
}  // namespace lockstep
