// Schedules of a pipeline: their properties for all sizes, without devices.

#include <algorithm>
#include <map>

#include "03-model-split/pipeline/schedule_plan.h"
#include "03-model-split/pipeline/timetable.h"
#include "common/core/error.h"
#include "common/io/json.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::message_of;
using Kind = Instruction::Kind;

constexpr int kStages = 8, kMicroBatches = 32;

/// Calls `check(kind, stages, micro_batches)` for every schedule up to those sizes.
template <class Check>
void for_all(Check check) {
  for (int stages = 1; stages <= kStages; ++stages) {
    check(ScheduleKind::naive, stages, 1);
    for (int micro = 1; micro <= kMicroBatches; ++micro) {
      check(ScheduleKind::gpipe, stages, micro);
      check(ScheduleKind::one_f1b, stages, micro);
    }
  }
}

/// The position of each instruction; fails if one appears twice.
std::map<std::pair<Kind, int>, int> places(const Instructions& list) {
  std::map<std::pair<Kind, int>, int> found;
  for (const Instruction& i : list) {
    const int place = static_cast<int>(found.size());
    REQUIRE(found.emplace(std::pair(i.kind, i.micro_batch), place).second);
  }
  return found;
}

TEST_CASE("Every stage runs every micro-batch forward once and backward once, in order",
          "[schedule][row44]") {
  for_all([](ScheduleKind kind, int stages, int micro) {
    for (int stage = 0; stage < stages; ++stage) {
      const Instructions list = make_schedule(kind, stages, micro, stage);
      const auto at = places(list);
      const bool first = stage == 0, last = stage == stages - 1;
      const size_t per_micro_batch = 2 + (first ? 0 : 2) + (last ? 0 : 2);
      REQUIRE(list.size() == per_micro_batch * micro + 1);
      REQUIRE(list.back() == Instruction{Kind::step, 0});
      for (int i = 0; i < micro; ++i) {
        const auto place = [&](Kind what) { return at.at({what, i}); };
        REQUIRE(place(Kind::forward) < place(Kind::backward));
        if (!first) REQUIRE(place(Kind::receive_activation) < place(Kind::forward));
        if (!last) REQUIRE(place(Kind::forward) < place(Kind::send_activation));
        if (!last) REQUIRE(place(Kind::receive_gradient) < place(Kind::backward));
        if (!first) REQUIRE(place(Kind::backward) < place(Kind::send_gradient));
        if (i == 0) continue;  // first in, first out: running statistics and sums have one order
        REQUIRE(at.at({Kind::forward, i - 1}) < place(Kind::forward));
        REQUIRE(at.at({Kind::backward, i - 1}) < place(Kind::backward));
      }
    }
  });
}

TEST_CASE("Neighbours send in the order in which the other receives", "[schedule][row44]") {
  const auto of_kind = [](const Instructions& list, Kind kind) {
    std::vector<int> micro_batches;
    for (const Instruction& i : list) {
      if (i.kind == kind) micro_batches.push_back(i.micro_batch);
    }
    return micro_batches;
  };
  for_all([&](ScheduleKind kind, int stages, int micro) {
    const std::vector<Instructions> all = make_schedules(kind, stages, micro);
    for (int stage = 0; stage + 1 < stages; ++stage) {
      REQUIRE(of_kind(all[stage], Kind::send_activation) ==
              of_kind(all[stage + 1], Kind::receive_activation));
      REQUIRE(of_kind(all[stage + 1], Kind::send_gradient) ==
              of_kind(all[stage], Kind::receive_gradient));
    }
  });
}

TEST_CASE("The makespan and the bubble are those of the formula", "[schedule][row44][row46]") {
  for (const double backward : {1.0, 2.0}) {
    for_all([&](ScheduleKind kind, int stages, int micro) {
      const Timetable table = simulate(make_schedules(kind, stages, micro), 1, backward);
      REQUIRE(table.makespan == Approx((micro + stages - 1) * (1 + backward)));
      REQUIRE(table.bubble() == Approx(predicted_bubble(stages, micro)).margin(1e-12));
    });
  }
}

TEST_CASE("A stage keeps the activations of no more micro-batches than the bound",
          "[schedule][row45]") {
  for_all([](ScheduleKind kind, int stages, int micro) {
    const Timetable table = simulate(make_schedules(kind, stages, micro), 1, 2);
    for (int stage = 0; stage < stages; ++stage) {
      const int bound = kind == ScheduleKind::one_f1b ? std::min(stages - stage, micro) : micro;
      REQUIRE(table.live[stage] == bound);
      REQUIRE(predicted_live(kind, stages, micro, stage) == bound);
    }
  });
}

/// The most that lane `lane` of a plan has taken and not given back.
double most_counted(const nlohmann::json& plan, int lane) {
  double most = 0;
  for (const auto& at : plan["work"]) {
    double count = 0;
    for (const auto& other : plan["work"]) {
      if (other["lane"] != lane) continue;
      if (other["begin"] <= at["begin"]) count += other["takes"].get<double>();
      if (other["end"] <= at["begin"]) count -= other["gives"].get<double>();
    }
    most = std::max(most, count);
  }
  return most;
}

TEST_CASE("A plan's times and counts are those of the simulation, from its dependencies alone",
          "[schedule]") {
  for (const ScheduleKind kind : {ScheduleKind::gpipe, ScheduleKind::one_f1b}) {
    for (const auto& [stages, micro] :
         std::vector<std::pair<int, int>>{{1, 1}, {2, 4}, {4, 8}, {5, 3}}) {
      const Timetable table = simulate(make_schedules(kind, stages, micro), 1, 2);
      const auto plan = nlohmann::json::parse(plan_of(kind, stages, micro).json());
      REQUIRE(plan["work"].size() == size_t(2 * stages * micro));
      REQUIRE(plan["formula"]["value"] == Approx(table.bubble()).margin(1e-12));
      std::vector<size_t> next(size_t(stages), 0);
      for (const auto& work : plan["work"]) {
        const size_t stage = work["lane"];
        const Slot& slot = table.stages[stage][next[stage]++];
        REQUIRE(work["begin"] == Approx(slot.begin));
        REQUIRE(work["end"] == Approx(slot.end));
      }
      for (int stage = 0; stage < stages; ++stage) {
        REQUIRE(most_counted(plan, stage) == table.live[size_t(stage)]);
        REQUIRE(plan["lanes"][size_t(stage)]["predicted_most"] == table.live[size_t(stage)]);
      }
    }
  }
}

TEST_CASE("No schedule needs buffers: nobody waits for ever in a blocking send",
          "[schedule][row44]") {
  for_all([](ScheduleKind kind, int stages, int micro) {
    const std::vector<Instructions> all = make_schedules(kind, stages, micro);
    REQUIRE(simulate(all, 1, 1, true).makespan >= simulate(all, 1, 1).makespan - 1e-12);
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
  CHECK(parse_schedule("1f1b") == ScheduleKind::one_f1b);
  CHECK_THAT(message_of<BadInput>([] { parse_schedule("1F1B"); }),
             ContainsSubstring("'1F1B', expected naive, gpipe or 1f1b"));
}

}  // namespace
}  // namespace lockstep
