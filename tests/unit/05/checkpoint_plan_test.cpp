// When a run saves, and what happens when a save fails.

#include "05-syncbn-checkpoint/checkpoint_plan.h"

#include "common/core/error.h"
#include "common/nn/layers.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/free_port.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/shm_ranks.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using testing::message_of;
using testing::TempDir;

constexpr int64_t kStepsOfEpoch = 4;

/// A rank alone, with a network of ten numbers, that saves by a plan.
struct PlannedRun {
  explicit PlannedRun(const fs::path& directory, int64_t save_every = 0)
      : plan(options(directory, save_every), files_of({*network, parameters, optimizer}),
             *ranks.processes[0], group, kStepsOfEpoch, [this] { settle(); }) {
    device.kernels().fill(device.stream, 1, parameters.values());
  }
  static SavingOptions options(const fs::path& directory, int64_t save_every) {
    SavingOptions saving;
    saving.directory = directory;
    saving.save_every = save_every;
    saving.keep = 100;
    return saving;
  }
  static std::unique_ptr<Module> make() {
    auto network = std::make_unique<Sequential>();
    network->add("fc", std::make_unique<Linear>(4, 2));
    network->set_name("");
    return network;
  }
  void settle() {
    ++settled;
    if (diverged) fail<NonFinite>("step {}: the loss is not finite", state.steps);
  }
  void step() {
    state.count_step(0.1);
    plan.after_step(state);
  }
  void epoch_ends() { plan.after_epoch(state, 0.5); }

  testing::TestDevice device;
  ProcessGroup group{testing::contract_of(0, 1, 0), {}};
  testing::Ranks ranks = testing::shm_ranks(1);
  std::unique_ptr<Module> network = make();
  FlatParameters parameters{*network, device.stream};
  Optimizer optimizer{parameters, {}};
  TrainingState state;
  int settled = 0;
  bool diverged = false;
  CheckpointPlan plan;
};

/// The steps of the checkpoints in a directory, the oldest first.
std::vector<int64_t> saved_steps(const fs::path& directory) {
  std::vector<int64_t> steps;
  for (const FoundCheckpoint& found : find_checkpoints(directory)) steps.push_back(found.steps);
  std::ranges::reverse(steps);
  return steps;
}

TEST_CASE("A run saves after every so many steps, and after every epoch", "[checkpoint]") {
  using Steps = std::vector<int64_t>;
  for (const auto& [every, expected] : std::vector<std::pair<int64_t, Steps>>{
           {0, {4, 8}}, {1, {1, 2, 3, 4, 5, 6, 7, 8}}, {3, {3, 4, 6, 8}}, {9, {4, 8}}}) {
    INFO("--save-every " << every);
    const TempDir folder;
    PlannedRun run(folder.path(), every);
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (int64_t i = 0; i < kStepsOfEpoch; ++i) run.step();
      run.epoch_ends();
    }
    CHECK(saved_steps(folder.path()) == expected);
    CHECK(run.settled >= std::ssize(expected));  // before each of them
    CHECK_NOTHROW(run.plan.finish());
    // A checkpoint saved after an epoch is in its place at the beginning of the next one.
    const Checkpoint last = read_checkpoint(checkpoint_path(folder.path(), 8));
    CHECK(TrainingState::from_json(last.training, "it") == run.state);
    CHECK(run.state.epoch == 2);
    CHECK(run.state.step_in_epoch == 0);
  }
  PlannedRun without_directory("", 1);
  without_directory.step();
  without_directory.epoch_ends();
  CHECK(without_directory.settled == 0);
  CHECK_NOTHROW(without_directory.plan.finish());
}

TEST_CASE("A save that fails ends a run only if it was the last one", "[checkpoint][row116]") {
  const TempDir folder;
  const fs::path directory = folder / "saved";
  PlannedRun run(directory, 1);
  const auto occupy = [&] { testing::write_file(directory, std::string("not a directory")); };
  occupy();
  CHECK_NOTHROW(run.step());
  CHECK_THAT(message_of<EnvironmentError>([&] { run.plan.finish(); }),
             ContainsSubstring("the last checkpoint is missing: ") &&
                 ContainsSubstring("Not a directory"));
  fs::remove(directory);
  run.step();
  CHECK(saved_steps(directory) == std::vector<int64_t>{2});
  CHECK_NOTHROW(run.plan.finish());  // the next save made it good
  fs::remove_all(directory);
  occupy();
  run.epoch_ends();
  CHECK_THROWS_AS(run.plan.finish(), EnvironmentError);
}

TEST_CASE("A run that went wrong is not saved, and ends at once", "[checkpoint][row17]") {
  const TempDir folder;
  PlannedRun run(folder.path(), 2);
  run.step();
  run.diverged = true;
  CHECK(message_of<NonFinite>([&] { run.step(); }) == "step 2: the loss is not finite");
  CHECK(folder.names().empty());
}

TEST_CASE("The state counts steps and epochs, and remembers the best accuracy", "[checkpoint]") {
  TrainingState state;
  state.count_step(0.25);
  state.count_step(0.125);
  CHECK(state.steps == 2);
  CHECK(state.step_in_epoch == 2);
  CHECK(state.epoch == 0);
  CHECK(state.learning_rate == 0.125);
  state.count_epoch(0.5);
  CHECK(state.epoch == 1);
  CHECK(state.step_in_epoch == 0);
  CHECK(state.best_accuracy == 0.5);
  state.count_step(0.25);
  state.count_epoch(0.375);  // worse than the one before
  CHECK(state.steps == 3);
  CHECK(state.epoch == 2);
  CHECK(state.best_accuracy == 0.5);
  state.count_epoch(0.75);
  CHECK(state.best_accuracy == 0.75);
}

}  // namespace
}  // namespace lockstep
