// Groups of ranks that save and resume: training continues, and from which checkpoint.

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>
#include <vector>

#include "common/core/error.h"
#include "common/io/json.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/process.h"
#include "tests/support/tasks.h"
#include "tests/unit/05/checkpoint_runs.h"

namespace lockstep {
namespace {

using namespace testing::checkpoints;
namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using testing::message_of;
using testing::operator+;
using testing::TempDir;
using testing::Words;

// --- Training goes on ----------------------------------------------------------------------------

TEST_CASE("Two epochs, a checkpoint and two epochs are four epochs, to the bit",
          "[checkpoint][row106][row107]") {
  for (const int world_size : {1, 2}) {
    if (world_size == 1 && !testing::full_campaign()) continue;
    INFO(world_size << " ranks");
    const TempDir folder;
    train_and_save(world_size, RunOptions(folder.path()), 8);
    CHECK(folder.names() == Words{momentum_name(8), checkpoint_name(8)});
    const auto restored = results_of(world_size, RunOptions(folder.path()),
                                     [](Trainee& trainee) { trainee.resume(); });
    const RunResult saved = trained_straight(world_size, 8)[0];
    for (const RunResult& rank : restored) CHECK(rank == saved);
    const auto resumed = results_of(world_size, RunOptions(folder.path()), [](Trainee& trainee) {
      trainee.resume();
      trainee.train(16);
    });
    const auto straight = trained_straight(world_size, 16);
    CHECK(resumed == straight);
    CHECK(straight[0].tracked == std::vector<int64_t>{16, 16});
    CHECK(straight[size_t(world_size) - 1].weights == straight[0].weights);
  }
}

// Under ThreadSanitizer, too: rank 0's tensors reach the other rank's kernels in order.
TEST_CASE("A run goes on in the middle of an epoch, at its end and at its beginning",
          "[checkpoint][row109][tsan]") {
  const auto straight = trained_straight(2, 7);
  for (const int64_t steps : {0, 3, 4, 6}) {
    INFO("resumed after " << steps << " steps");
    const TempDir folder;
    train_and_save(2, RunOptions(folder.path()), steps);
    CHECK(results_of(2, RunOptions(folder.path()), [](Trainee& trainee) {
            trainee.resume();
            trainee.train(7);
          }) == straight);
  }
}

TEST_CASE("Without momentum, random state or epoch the resumed run is another",
          "[checkpoint][row108]") {
  RunOptions run;
  run.options.lr_step = 0;  // so that the step number reaches nothing but dropout
  const auto straight = trained_straight(1, 8, run);
  const TempDir folder;
  run.saving = RunOptions(folder.path()).saving;
  train_and_save(1, run, 6);
  const auto resumed = [&](const std::function<void(Trainee&)>& forget) {
    return results_of(1, run, [&](Trainee& trainee) {
      trainee.resume();
      const int64_t left = 8 - trainee.state.steps;
      forget(trainee);
      trainee.train(trainee.state.steps + left);
    });
  };
  CHECK(resumed([](Trainee&) {}) == straight);
  CHECK(resumed([](Trainee& trainee) {
          trainee.stream.kernels().fill(trainee.stream, 0,
                                        trainee.optimizer.state().at(0).ranges.at(0));
        }) != straight);
  CHECK(resumed([](Trainee& trainee) { trainee.state.steps = 0; }) != straight);
  CHECK(resumed([](Trainee& trainee) { trainee.state.epoch = 0; }) != straight);
  CHECK(resumed([](Trainee& trainee) { trainee.state.step_in_epoch = 0; }) != straight);
}

TEST_CASE("A checkpoint holds what its state says", "[checkpoint][row106]") {
  const TempDir folder;
  train_and_save(2, RunOptions(folder.path()), 6);
  const Checkpoint checkpoint = read_checkpoint(folder / checkpoint_name(6));
  const TrainingState state = TrainingState::from_json(checkpoint.training, "it");
  CHECK(state.epoch == 1);
  CHECK(state.step_in_epoch == 2);
  CHECK(state.first_batch(1) == 2);
  CHECK(state.first_batch(2) == 0);
  CHECK(state.learning_rate == 0.05 * 0.7);
  CHECK(state.world_size == 2);
  CHECK(state.settings["batch_size"] == 6);
  CHECK(state.settings["momentum"] == 0.9);
  CHECK(state.settings["data_crc32"] == fmt::format("{:08x}", training_data().train.fingerprint()));
  CHECK_FALSE(state.settings.contains("epochs"));
  CHECK(checkpoint.network.size() == 18);
  CHECK(checkpoint.optimizer.size() == 12);
  CHECK(std::ranges::count(checkpoint.optimizer, "momentum.fc1.weight", &StateTensor::name) == 1);
}

TEST_CASE("A run with AdamW resumes to the same bits, its moments and its step", "[checkpoint]") {
  const TempDir folder;
  RunOptions run;
  run.options.optimizer = OptimizerKind::adamw, run.options.momentum = 0;
  run.options.lr = 0.01, run.options.weight_decay = 0.1;
  const auto straight = trained_straight(2, 8, run);
  run.saving = RunOptions(folder.path()).saving;
  train_and_save(2, run, 6);
  const Checkpoint checkpoint = read_checkpoint(folder / checkpoint_name(6));
  CHECK(checkpoint.optimizer.size() == 36);
  for (const std::string name :
       {"exp_avg.conv1.weight", "exp_avg_sq.conv1.weight", "step.conv1.weight"}) {
    CHECK(std::ranges::count(checkpoint.optimizer, name, &StateTensor::name) == 1);
  }
  CHECK(results_of(2, run, [](Trainee& trainee) {
          trainee.resume();
          trainee.train(8);
        }) == straight);
  // Every one of the three counts.
  for (const int forgotten : {0, 1, 2}) {
    CHECK(results_of(2, run, [&](Trainee& trainee) {
            trainee.resume();
            const int64_t left = 8 - trainee.state.steps;
            if (forgotten == 2) {
              trainee.optimizer.set_steps(std::vector<int64_t>(12, 0));
            } else {
              trainee.stream.kernels().fill(trainee.stream, 0,
                                            trainee.optimizer.state()[size_t(forgotten)].ranges[0]);
            }
            trainee.train(trainee.state.steps + left);
          }) != straight);
  }
}

TEST_CASE("The state of another optimizer is refused", "[checkpoint]") {
  const TempDir folder;
  const OptimizerRule adam{.kind = OptimizerKind::adam};
  SmallRun(3, adam).save(folder.path());
  const Checkpoint checkpoint = read_checkpoint(folder / checkpoint_name(3));
  SmallRun sgd;
  CHECK_THAT(message_of<BadInput>([&] { restore(checkpoint, sgd.trained()); }),
             ContainsSubstring("the optimizer that was saved has exp_avg and exp_avg_sq, this "
                               "run's has momentum"));
  CHECK(sgd.holds(0));
  SmallRun again(0, adam);
  restore(checkpoint, again.trained());
  CHECK(again.holds(3));
}

TEST_CASE("Each parameter goes on with its own step, or, from older files, with training's",
          "[checkpoint]") {
  const TempDir folder;
  const OptimizerRule adam{.kind = OptimizerKind::adam};
  SmallRun run(9, adam);
  run.optimizer.set_steps({9, 4});  // of fc.bias and fc.weight
  run.save(folder.path());
  const Checkpoint checkpoint = read_checkpoint(folder / checkpoint_name(9));
  const auto steps_after = [&](const std::function<void(Checkpoint&)>& change) {
    Checkpoint changed = checkpoint;
    change(changed);
    SmallRun again(0, adam);
    restore(changed, again.trained());
    return again.optimizer.steps();
  };
  const auto step_of_weight = [](Checkpoint& changed) -> StateTensor& {
    return *std::ranges::find(changed.optimizer, "step.fc.weight", &StateTensor::name);
  };
  CHECK(steps_after([](Checkpoint&) {}) == std::vector<int64_t>{9, 4});
  CHECK(steps_after([](Checkpoint& older) {
          std::erase_if(older.optimizer,
                        [](const StateTensor& tensor) { return tensor.name.starts_with("step."); });
        }) == std::vector<int64_t>{9, 9});
  for (const Real wrong : {Real(2.5), Real(10), Real(-1), std::numeric_limits<Real>::quiet_NaN()}) {
    CHECK_THAT(message_of<BadInput>([&] {
                 steps_after([&](Checkpoint& changed) { step_of_weight(changed).real = {wrong}; });
               }),
               ContainsSubstring("expected a whole number from 0 to 9, the steps of training"));
  }
  CHECK_THAT(message_of<BadInput>([&] {
               steps_after([&](Checkpoint& changed) { step_of_weight(changed).name += "s"; });
             }),
             ContainsSubstring("no step.fc.weight, expected one"));
  CHECK_THAT(message_of<BadInput>([&] {
               steps_after([&](Checkpoint& changed) {
                 step_of_weight(changed).shape = {2};
                 step_of_weight(changed).real = {1, 1};
               });
             }),
             ContainsSubstring("step.fc.weight has shape [2], expected one number"));
}

TEST_CASE("Without momentum there is one file", "[checkpoint]") {
  const TempDir folder;
  SmallRun(3, 0).save(folder.path());
  CHECK(folder.names() == Words{checkpoint_name(3)});
  SmallRun run(0, 0);
  restore(read_checkpoint(folder / checkpoint_name(3)), run.trained());
  CHECK(run.holds(3));
  SmallRun other;
  CHECK_THAT(
      message_of<BadInput>(
          [&] { restore(read_checkpoint(folder / checkpoint_name(3)), other.trained()); }),
      ContainsSubstring("the optimizer that was saved has no state, this run's has momentum; "
                        "give it the same --optimizer and --momentum"));
  CHECK(other.holds(0));
}

// --- Which checkpoint ----------------------------------------------------------------------------

TEST_CASE("Rank 0 decides and reads, whatever the others see", "[checkpoint][row118]") {
  const TempDir folder;
  train_and_save(2, RunOptions(folder.path()), 3);
  const auto straight = trained_straight(2, 5);
  for (const char* source : {"auto", "file"}) {
    std::vector<RunResult> results(2);
    const auto options = [&](int rank) {
      return RunOptions(rank == 0 ? folder.path() : fs::path("/proc/nowhere"));
    };
    const Words errors = run_group(2, options, [&](Trainee& trainee, int rank) {
      const std::string file =
          rank == 0 ? (folder / checkpoint_name(3)).string() : "/proc/nowhere/file";
      trainee.resume(source == std::string("auto") ? "auto" : file);
      trainee.train(5);
      results[size_t(rank)] = trainee.result();
    });
    CHECK(errors == no_errors(2));
    CHECK(results == straight);
  }
  const Words errors = run_group(2, RunOptions(folder.path()), [&](Trainee& trainee, int rank) {
    trainee.resume(rank == 0 ? folder / "missing" : folder / checkpoint_name(3));
  });
  CHECK_THAT(errors[0], ContainsSubstring("cannot open " + (folder / "missing").string()));
  CHECK(errors[1] == errors[0]);
}

TEST_CASE("Where there is no checkpoint a run begins anew and says so", "[checkpoint]") {
  const TempDir folder;
  for (const fs::path& directory : {folder.path(), folder / "not/yet"}) {
    RunOptions run(directory);
    Words said;
    run.saving.say = [&](const std::string& line) { said.push_back(line); };
    const auto results = results_of(1, run, [](Trainee& trainee) {
      trainee.resume();
      trainee.train(1);
      trainee.save();
    });
    CHECK(results == trained_straight(1, 1));
    CHECK(said.at(0) == "No checkpoint in " + directory.string() + ": training begins anew");
    CHECK(said.size() == 2);
    // With the momentum's file, and the time it took.
    const fs::path saved = directory / checkpoint_name(1);
    CHECK_THAT(said.back(), Catch::Matchers::StartsWith(fmt::format(
                                "Saved {}: {} bytes in ", saved.string(),
                                fs::file_size(saved) + fs::file_size(optimizer_path(saved)))));
    CHECK(newest_checkpoint(directory, [](const std::string&) {}).has_value());
  }
  testing::write_file(folder / "file", "");
  CHECK_THROWS_AS(find_checkpoints(folder / "file"), EnvironmentError);
}

TEST_CASE("Counters that contradict each other are refused, though the checksums are right",
          "[checkpoint]") {
  const TempDir folder;
  RunOptions run(folder / "run");
  run.steps_per_epoch = kStepsPerEpoch;
  const auto saved_with = [&](int64_t epoch, int64_t step_in_epoch, int64_t steps) {
    fs::remove_all(folder / "run");
    return run_group(1, run, [&](Trainee& trainee, int) {
      trainee.state.epoch = epoch;
      trainee.state.step_in_epoch = step_in_epoch;
      trainee.state.steps = steps;
      trainee.save();
      trainee.resume();
    })[0];
  };
  CHECK(saved_with(0, 0, 0).empty());
  CHECK(saved_with(0, 4, 4).empty());  // where only the evaluation is missing
  CHECK(saved_with(1, 0, 4).empty());
  CHECK(saved_with(2, 3, 11).empty());
  CHECK_THAT(saved_with(0, 0, 20),
             ContainsSubstring("found step 0 of epoch 0 and 20 steps in all, "
                               "which contradict each other: an epoch has 4"));
  CHECK_THAT(saved_with(1, 0, 3), ContainsSubstring("contradict"));
  CHECK_THAT(saved_with(0, 5, 5), ContainsSubstring("contradict"));
  CHECK_THAT(saved_with(1, 4, 7), ContainsSubstring("contradict"));
}

TEST_CASE("A run does not begin in front of another run's checkpoints", "[checkpoint]") {
  const TempDir folder;
  for (const int64_t steps : {2, 4}) {
    RunOptions run(folder.path());
    train_and_save(1, run, steps);
  }
  for (const std::string& source : {std::string(), (folder / checkpoint_name(2)).string()}) {
    const Words errors = run_group(2, RunOptions(folder.path()),
                                   [&](Trainee& trainee, int) { trainee.resume(source); });
    CHECK_THAT(errors[0], ContainsSubstring(checkpoint_name(4) + " is later"));
    CHECK(errors[1] == errors[0]);
  }
  CHECK(results_of(1, RunOptions(folder.path()), [&](Trainee& trainee) {
          trainee.resume(folder / checkpoint_name(4));
          trainee.train(6);
        }) == trained_straight(1, 6));
  // Those where it was started do not matter to one that saves nothing.
  const fs::path started_in = fs::current_path();
  fs::current_path(folder.path());
  const Words alone = run_group(1, RunOptions(), [](Trainee& trainee, int) { trainee.resume(""); });
  fs::current_path(started_in);
  CHECK(alone == no_errors(1));
}

TEST_CASE("A run that goes on from elsewhere does not remove another run's checkpoints",
          "[checkpoint]") {
  const TempDir mine, other;
  RunOptions there(other.path());
  train_and_save(1, there, 2);
  RunOptions here(mine.path());
  train_and_save(1, here, 4);
  const Words errors = run_group(2, RunOptions(other.path()), [&](Trainee& trainee, int) {
    trainee.resume(mine / checkpoint_name(4));
  });
  CHECK_THAT(errors[0],
             ContainsSubstring("holds checkpoints, but " + (mine / checkpoint_name(4)).string()) &&
                 ContainsSubstring("give an empty directory"));
  CHECK(errors[1] == errors[0]);
}

TEST_CASE("After a fall-back a damaged checkpoint does not count until it is saved again",
          "[checkpoint]") {
  // Past the damaged one, 4, which would count as the second newest, 2 stays; once 4 is saved again
  // it need not stay any more.
  for (const std::vector<int64_t>& saved : {std::vector<int64_t>{5}, {4, 5}}) {
    const TempDir folder;
    for (const int64_t steps : {2, 4}) train_and_save(1, RunOptions(folder.path()), steps);
    fs::resize_file(folder / checkpoint_name(4), 100);
    results_of(1, RunOptions(folder.path()), [&](Trainee& trainee) {
      trainee.resume();
      for (const int64_t steps : saved) {
        trainee.train(steps);
        trainee.save();
      }
    });
    if (saved.size() == 1) {
      for (const int64_t steps : {2, 5}) {
        CHECK_NOTHROW(read_checkpoint(folder / checkpoint_name(steps)));
      }
    } else {
      CHECK(folder.names() ==
            Words{momentum_name(4), checkpoint_name(4), momentum_name(5), checkpoint_name(5)});
    }
  }
}

TEST_CASE("A checkpoint is saved although an older one cannot be removed", "[checkpoint]") {
  const TempDir folder;
  fs::create_directories(folder.path() / checkpoint_name(1) / "not empty");
  RunOptions run(folder.path());
  Words warnings;
  run.saving.warn = [&](const std::string& line) { warnings.push_back(line); };
  results_of(1, run, [](Trainee& trainee) {
    for (const int64_t steps : {2, 3}) {
      trainee.train(steps);
      trainee.save();
    }
  });
  REQUIRE(warnings.size() == 1);
  CHECK_THAT(warnings[0], ContainsSubstring("step 3 is saved, but an older one stays: "));
  CHECK(newest_checkpoint(folder.path(), [](const std::string&) {})->path ==
        folder / checkpoint_name(3));
}

TEST_CASE("Nothing that is not finite is saved, and it is named", "[checkpoint][row17]") {
  const TempDir folder;
  SmallRun run(2);
  run.save(folder.path());
  run.set(3);
  run.parameters.parameters()[1]->value.copy_from_host({1, std::numeric_limits<Real>::infinity()});
  CHECK_THAT(message_of<NonFinite>([&] { run.save(folder.path()); }),
             ContainsSubstring("after 3 steps fc.bias holds inf"));
  run.set(3);
  run.device.kernels().fill(run.device.stream, std::numeric_limits<Real>::quiet_NaN(),
                            run.optimizer.state().at(0).ranges.at(0));
  CHECK_THAT(message_of<NonFinite>([&] { run.save(folder.path()); }),
             ContainsSubstring("momentum.fc.weight holds nan"));
  CHECK(folder.names() == Words{momentum_name(2), checkpoint_name(2)});
}

TEST_CASE("Another order of sums is told, and allowed", "[checkpoint]") {
  const json gloo = {{"lr", 1}, {"backend", "gloo"}, {"threads_per_device", 1}};
  json tcp = gloo;
  tcp["backend"] = "tcp";
  CHECK_NOTHROW(require_saved_settings(gloo, tcp, "F"));
  CHECK(other_order_of_sums(gloo, tcp) == "backend \"tcp\" instead of \"gloo\"");
  CHECK(other_order_of_sums(gloo, gloo).empty());
}

TEST_CASE("Of runs that begin while another ends one alone has the directory", "[checkpoint]") {
  const TempDir folder;
  std::atomic<int> inside = 0, times = 0, together = 0;
  std::vector<std::thread> runs;
  for (int i = 0; i < 4; ++i) {
    runs.emplace_back([&] {
      for (const auto begin = testing::Clock::now(); testing::seconds_since(begin) < 0.2;) {
        try {
          const DirectoryLock lock(folder.path());
          if (++inside > 1) ++together;
          std::this_thread::yield();
          ++times;
          --inside;
        } catch (const BadInput&) {
          // Another has it.
        }
      }
    });
  }
  for (std::thread& run : runs) run.join();
  CHECK(together == 0);
  CHECK(times > 0);
}

TEST_CASE("The newest checkpoints are kept, at least two", "[checkpoint]") {
  const TempDir folder;
  SmallRun run;
  for (const int64_t steps : {9, 10, 100, 1'000'000'000}) run.save(folder.path(), double(steps));
  testing::write_file(folder / "step-7.safetensors", "not a name of ours");
  remove_old_checkpoints(folder.path(), 1'000'000'000, 3);
  CHECK(find_checkpoints(folder.path()) == std::vector<int64_t>{1'000'000'000, 100, 10});
  CHECK(folder.names().size() == 7);
  RunOptions one(folder.path());
  one.saving.keep = 1;
  CHECK_THAT(run_group(1, one, [](Trainee&, int) {})[0],
             ContainsSubstring("--keep: 1 checkpoints, expected 2 or more"));
}

}  // namespace
}  // namespace lockstep
