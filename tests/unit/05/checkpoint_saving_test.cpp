// What a save leaves in its directory, and what a failed one does.

#include <sys/stat.h>

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

// --- Saving --------------------------------------------------------------------------------------

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
  for (std::string& call : log) call = call.substr(0, call.find(" of"));  // sizes
  const Words save{"fsync file", "rename", "fsync directory"}, remove{"unlink", "fsync directory"};
  CHECK(log == save + save + remove + remove);
  const auto written = [&](const std::string& name) { return fs::last_write_time(folder / name); };
  CHECK(written(momentum_name(3)) <= written(checkpoint_name(3)));
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
    for (const FoundCheckpoint& found : find_checkpoints(folder.path())) {
      CHECK_NOTHROW(read_checkpoint(found.path));
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
