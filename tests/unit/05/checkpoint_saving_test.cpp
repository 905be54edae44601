// When a run saves, what a save leaves in its directory, and what happens when one fails.

#include <sys/stat.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/process.h"
#include "tests/support/replaced_system_calls.h"
#include "tests/support/shm_ranks.h"
#include "tests/unit/05/checkpoint_runs.h"

namespace lockstep {
namespace {

using namespace testing::checkpoints;
namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using testing::message_of;
using testing::operator+;
using testing::TempDir;
using testing::Words;

// --- When a run saves ----------------------------------------------------------------------------

/// A rank alone, with a network of ten numbers, that saves as the options say.
struct ShortRun : SmallRun {
  explicit ShortRun(const fs::path& directory, int64_t save_every = 0)
      : SmallRun(1, 0),
        checkpoints(
            trained(), SavingOptions{.directory = directory, .save_every = save_every, .keep = 100},
            *ranks.comms[0], [](const std::string& mine) { return Words{mine}; }, kStepsPerEpoch,
            [this] { settle(); }) {
    state = {};
  }
  void settle() {
    ++settled;
    if (diverged) fail<NonFinite>("step {}: the loss is not finite", state.steps);
  }
  void step() {
    state.count_step(0.1);
    checkpoints.after_step(state);
  }
  void epoch_ends() { checkpoints.after_epoch(state, 0.5); }

  testing::Ranks ranks = testing::shm_ranks(1);
  int settled = 0;
  bool diverged = false;
  RankZeroCheckpointer checkpoints;
};

/// The steps of the checkpoints in a directory, the oldest first.
std::vector<int64_t> saved_steps(const fs::path& directory) {
  std::vector<int64_t> steps = find_checkpoints(directory);
  std::ranges::reverse(steps);
  return steps;
}

TEST_CASE("A run saves after every so many steps, and after every epoch", "[checkpoint]") {
  using Steps = std::vector<int64_t>;
  for (const auto& [every, expected] : std::vector<std::pair<int64_t, Steps>>{
           {0, {4, 8}}, {1, {1, 2, 3, 4, 5, 6, 7, 8}}, {3, {3, 4, 6, 8}}, {9, {4, 8}}}) {
    INFO("--save-every " << every);
    const TempDir folder;
    ShortRun run(folder.path(), every);
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (int64_t i = 0; i < kStepsPerEpoch; ++i) run.step();
      run.epoch_ends();
    }
    CHECK(saved_steps(folder.path()) == expected);
    CHECK(run.settled >= std::ssize(expected));  // before each of them
    CHECK_NOTHROW(run.checkpoints.finish());
    // A checkpoint saved after an epoch is in its place at the beginning of the next one.
    const Checkpoint last = read_checkpoint(checkpoint_path(folder.path(), 8));
    CHECK(TrainingState::from_json(last.training, "it") == run.state);
    CHECK(run.state.epoch == 2);
    CHECK(run.state.step_in_epoch == 0);
  }
  ShortRun without_directory("", 1);
  without_directory.step();
  without_directory.epoch_ends();
  CHECK(without_directory.settled == 0);
  CHECK_NOTHROW(without_directory.checkpoints.finish());
}

TEST_CASE("A save that fails ends a run only if it was the last one", "[checkpoint][row116]") {
  const TempDir folder;
  const fs::path directory = folder / "saved";
  ShortRun run(directory, 1);
  const auto occupy = [&] { testing::write_file(directory, std::string("not a directory")); };
  occupy();
  CHECK_NOTHROW(run.step());
  CHECK_THAT(message_of<EnvironmentError>([&] { run.checkpoints.finish(); }),
             ContainsSubstring("the last checkpoint is missing: ") &&
                 ContainsSubstring("Not a directory"));
  fs::remove(directory);
  run.step();
  CHECK(saved_steps(directory) == std::vector<int64_t>{2});
  CHECK_NOTHROW(run.checkpoints.finish());  // the next save made it good
  fs::remove_all(directory);
  occupy();
  run.epoch_ends();
  CHECK_THROWS_AS(run.checkpoints.finish(), EnvironmentError);
}

TEST_CASE("A run that went wrong is not saved, and ends at once", "[checkpoint][row17]") {
  const TempDir folder;
  ShortRun run(folder.path(), 2);
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

// --- What a save leaves --------------------------------------------------------------------------

TEST_CASE("Momentum comes to the disk before the network, and goes after it",
          "[checkpoint][row117]") {
  const TempDir folder;
  std::set<std::thread::id> threads;
  Words log;
  bool rank1_found_it = false;
  const Words errors = run_group(2, RunOptions(folder.path()), [&](Trainee& trainee, int rank) {
    for (int64_t steps = 1; steps <= 2; ++steps) {
      trainee.train(steps);
      trainee.save();
    }
    trainee.train(3);
    std::optional<testing::SystemCalls> calls;
    if (rank == 0) calls.emplace();
    trainee.save();
    if (rank == 1) rank1_found_it = fs::exists(folder / checkpoint_name(3));
    if (rank == 0) threads = calls->threads, log = calls->log;
  });
  CHECK(errors == no_errors(2));
  CHECK(rank1_found_it);
  CHECK(threads.size() == 1);
  CHECK(folder.names() ==
        Words{momentum_name(2), checkpoint_name(2), momentum_name(3), checkpoint_name(3)});
  const auto synced = [&](const std::string& name) {
    return fmt::format("fsync file of {} bytes", fs::file_size(folder / name));
  };
  REQUIRE(log.size() > 3);
  CHECK(log[0] == synced(momentum_name(3)));
  CHECK(log[3] == synced(checkpoint_name(3)));
  for (std::string& call : log) call = call.substr(0, call.find(" of"));  // sizes
  const Words save{"fsync file", "rename", "fsync directory"}, remove{"unlink", "fsync directory"};
  CHECK(log == save + save + remove + remove);
}

TEST_CASE("A save that fails at any of its steps leaves a directory that can be resumed from",
          "[checkpoint][row115][row116]") {
  for (int64_t n = 0; n < 10; ++n) {
    INFO("system call " << n);
    const TempDir folder;
    SmallRun run;
    run.save(folder.path(), 1);
    run.save(folder.path(), 2);
    std::string error;
    run.set(3);
    {
      testing::SystemCalls calls;
      calls.failing_number = n;
      error = message_of<EnvironmentError>([&] {
        run.save(folder.path());
        remove_old_checkpoints(folder.path(), 3, 2);
      });
    }
    CHECK_THAT(error, ContainsSubstring("Input/output error"));
    CHECK(newest_mark(folder.path()) == (n <= 4 ? 2 : 3));  // 4: the rename of the network's file
    CHECK(run.holds(3));
    for (const std::string& name : folder.names()) CHECK_FALSE(name.ends_with(".tmp"));
    for (const int64_t steps : find_checkpoints(folder.path())) {
      CHECK_NOTHROW(read_checkpoint(folder / checkpoint_name(steps)));
    }
    run.save(folder.path(), 3);
    remove_old_checkpoints(folder.path(), 3, 2);
    CHECK(folder.names() ==
          Words{momentum_name(2), checkpoint_name(2), momentum_name(3), checkpoint_name(3)});
  }
}

TEST_CASE("What a killed save left is removed by the next", "[checkpoint][row115]") {
  const TempDir folder;
  SmallRun run;
  run.save(folder.path(), 1);
  fs::copy_file(folder / momentum_name(1), folder / momentum_name(2));
  testing::write_file(folder / ("." + checkpoint_name(2) + ".77-0.tmp"), "half");
  testing::write_file(folder / "notes.txt", "mine");
  testing::write_file(folder / ".other.tmp", "mine");
  run.save(folder.path(), 3);
  CHECK(folder.names() == Words{".other.tmp", "notes.txt", momentum_name(1), checkpoint_name(1),
                                momentum_name(3), checkpoint_name(3)});
}

/// Two ranks of which rank 0 cannot save in these circumstances.
void check_failing_save(const RunOptions& run, const TempDir& folder, const std::string& text,
                        const std::function<void(Trainee&, int rank)>& save) {
  const auto straight = trained_straight(2, 5);
  std::vector<RunResult> results(2);
  std::map<std::string, std::string> before, after;
  std::vector<std::string> refusals(2);
  const Words errors = run_group(2, run, [&](Trainee& trainee, int rank) {
    trainee.train(2);
    trainee.save();
    trainee.train(3);
    if (rank == 0) before = contents_of(folder);
    refusals[size_t(rank)] = message_of<EnvironmentError>([&] { save(trainee, rank); });
    if (rank == 0) after = contents_of(folder);
    trainee.train(4);
    trainee.save();
    trainee.train(5);
    results[size_t(rank)] = trainee.result();
  });
  CHECK(errors == no_errors(2));
  CHECK_THAT(refusals[0], ContainsSubstring(text) && ContainsSubstring(folder.path().string()));
  CHECK(refusals[1] == refusals[0]);
  CHECK(before.size() == 2);
  CHECK((after == before));
  CHECK(folder.names() ==
        Words{momentum_name(2), checkpoint_name(2), momentum_name(4), checkpoint_name(4)});
  CHECK(results == straight);
}

TEST_CASE("A full disk is told to all ranks, and training goes on", "[checkpoint][row116]") {
  for (const bool room_for_momentum : {false, true}) {
    const TempDir folder;
    check_failing_save(
        RunOptions(folder.path()), folder, "File too large; free some space",
        [&](Trainee& trainee, int rank) {
          if (rank != 0) return trainee.save();
          const auto momentum = fs::file_size(folder / momentum_name(2));
          const testing::FullDisk full(room_for_momentum ? momentum + 64 : momentum / 2);
          trainee.save();
        });
  }
}

TEST_CASE("A directory without write permission is told to all ranks", "[checkpoint][row116]") {
  const TempDir folder;
  check_failing_save(RunOptions(folder.path()), folder,
                     "Permission denied; give one that you may write to",
                     [&](Trainee& trainee, int rank) {
                       if (rank != 0) return trainee.save();
                       ::chmod(folder.path().c_str(), 0555);
                       std::string error;
                       std::thread user([&] {  // capabilities belong to a thread
                         testing::drop_capabilities();
                         error = message_of<EnvironmentError>([&] { trainee.save(); });
                       });
                       user.join();
                       ::chmod(folder.path().c_str(), 0755);
                       fail<EnvironmentError>("{}", error);
                     });
}

TEST_CASE("A run that left the finite numbers is not saved", "[checkpoint]") {
  const TempDir folder;
  Words messages(2);
  const Words errors = run_group(2, RunOptions(folder.path()), [&](Trainee& trainee, int rank) {
    trainee.train(2);
    trainee.save();
    if (rank == 1) {  // it reaches rank 0 through the sums
      const std::vector<Real> nothing(250, std::numeric_limits<Real>::quiet_NaN());
      trainee.parameters.parameters()[0]->value.copy_from_host(nothing);
    }
    trainee.train(4);
    messages[size_t(rank)] = message_of<NonFinite>([&] { trainee.save(); });
  });
  CHECK(errors == no_errors(2));
  CHECK_THAT(messages[0], ContainsSubstring("step 2: the loss or a gradient is not finite"));
  CHECK(messages[1] == messages[0]);
  CHECK(folder.names() == Words{momentum_name(2), checkpoint_name(2)});
}

}  // namespace
}  // namespace lockstep
