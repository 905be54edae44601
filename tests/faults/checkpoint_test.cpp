// Processes that are killed while they save.

#include "05-syncbn-checkpoint/checkpoint.h"

#include <csignal>
#include <random>

#include "tests/support/catch.h"
#include "tests/support/process.h"
#include "tests/support/stage.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;

/// A run that saves every `every` steps, and is killed after `seconds`.
ProcessResult run_saver(const std::filesystem::path& directory, int64_t steps, int64_t every,
                        double seconds) {
  return run_process({build_dir() + "/tests/faults/checkpoint-saver", directory,
                      std::to_string(steps), std::to_string(every)},
                     seconds);
}

/// What is in a directory after a kill.
struct Remains {
  explicit Remains(const TempDir& folder) {
    const auto newest =
        newest_checkpoint(folder.path(), [&](const std::string& line) { damage += line + "\n"; });
    if (newest) steps = TrainingState::from_json(newest->training, "it").steps;
    for (const std::string& name : folder.names()) is_interrupted |= name.ends_with(".tmp");
  }
  int64_t steps = 0;  // of the newest checkpoint; 0 without one
  std::string damage{};
  bool is_interrupted = false;
};

TEST_CASE("Killed at any moment while it saves, a run ends as if it had never been",
          "[faults][checkpoint][row115]") {
  const int kills = full_campaign() ? 200 : 10;
  const TempDir folder, straight;
  const auto begin = Clock::now();
  REQUIRE(run_saver(straight.path(), 1, 1, kDeadline).status == 0);
  const double start = seconds_since(begin);

  std::mt19937 random(115);
  int64_t steps = 0;
  int interrupted = 0, kills_after_a_save = 0;
  for (int kill = 0; kill < kills; ++kill) {
    INFO("kill " << kill << " of " << kills << ", after " << steps << " steps");
    const double longest = (0.1 + start) * (steps > 0 ? 1 : kill + 1);  // others may want the cores
    const double moment = start / 2 + std::uniform_real_distribution<>(0, longest)(random);
    const ProcessResult run = run_saver(folder.path(), 1'000'000'000, 1, moment);
    INFO(story(run));
    CHECK(run.status == -SIGKILL);
    CHECK(run.err == "");
    const Remains remains(folder);
    CHECK(remains.damage == "");
    CHECK(remains.steps >= steps);
    steps = remains.steps;
    interrupted += remains.is_interrupted;
    kills_after_a_save += steps > 0;
  }
  CHECK(kills_after_a_save > 0);
  if (full_campaign()) CHECK(interrupted > 0);

  // Both end at the same step; the one that was never killed saves only there.
  const int64_t end = steps + 3;
  REQUIRE(run_saver(folder.path(), end, 1, kDeadline).status == 0);
  REQUIRE(run_saver(straight.path(), end, end, kDeadline).status == 0);
  for (const std::filesystem::path& file :
       {checkpoint_path("", end), optimizer_path(checkpoint_path("", end))}) {
    CHECK(read_text(folder / file) == read_text(straight / file));
  }
  CHECK(folder.names().size() == 4);
}

}  // namespace
}  // namespace lockstep
