// Stage 05's runs that end early, and resume.

#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "05-syncbn-checkpoint/checkpoint.h"
#include "common/io/safetensors.h"
#include "common/training/weights_file.h"
#include "tests/support/catch.h"
#include "tests/support/jobs.h"
#include "tests/support/json.h"
#include "tests/support/machine.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

std::string stage05() { return stage_binary("05-syncbn-checkpoint"); }

/// Ten steps of 12 samples per epoch, with everything that a run remembers.
const Words kRun{
    "--data", "synthetic:120:10", "--batch-size", "12", "--lr",       "0.01", "--momentum",
    "0.9",    "--dropout",        "--lr-step",    "1",  "--lr-gamma", "0.5",  "--workers",
    "0",      "--log-interval",   "1000"};

/// A run of stage 05 that must end well.
ProcessResult train(const Jobs& jobs, const Words& options, const Words& run_options = kRun) {
  const ProcessResult run = jobs.run_words(Words{stage05()} + run_options + options);
  INFO(story(run));
  REQUIRE(run.status == 0);
  CHECK(jobs.processes() == Words{});
  return run;
}

/// Steps of the newest checkpoint that can be read; 0 without one. `path`, if given, becomes its.
int64_t steps_saved(const std::filesystem::path& directory) {
  const auto newest = newest_checkpoint(directory, [](const std::string&) {});
  return newest ? TrainingState::from_json(newest->training, "the newest").steps : 0;
}

TEST_CASE("A run that goes on ends with the bytes of one that never stopped",
          "[faults][checkpoint][row107][row109]") {
  for (const int ranks : {1, 2}) {
    const Jobs jobs;
    const TempDir saved;
    const Words all = Words{"--devices", cpus(ranks)};
    train(jobs, all + Words{"--epochs", "4", "--save", jobs / "straight"});
    const Words resumed =
        all + Words{"--checkpoint-dir", saved.path(), "--resume", "auto", "--save-every", "3"};
    // At an epoch's end, within one, and before the first step.
    train(jobs, resumed + Words{"--epochs", "2"});
    train(jobs, resumed + Words{"--epochs", "4", "--max-steps", "27"});
    CHECK(steps_saved(saved.path()) == 27);
    train(jobs, resumed + Words{"--epochs", "4", "--save", jobs / "resumed"});
    INFO(ranks << " ranks");
    CHECK((jobs.text("resumed") == jobs.text("straight")));
    // There is nothing left to do: the same weights, evaluated, and nothing new in the folder.
    const Words files = saved.names();
    const ProcessResult again = train(
        jobs,
        resumed + Words{"--epochs", "4", "--save", jobs / "again", "--metrics", jobs / "metrics"});
    CHECK_THAT(again.out, ContainsSubstring("Nothing is left to train: --epochs is 4"));
    CHECK(read_json(jobs / "metrics").at("accuracy").size() == 1);
    CHECK((jobs.text("again") == jobs.text("straight")));
    CHECK(saved.names() == files);
  }
}

/// A network with a layer that steps 1, 3, 5, ... leave out.
const Words kSkip{"--data",
                  "synthetic:120:10",
                  "--batch-size",
                  "12",
                  "--lr",
                  "0.01",
                  "--model",
                  "seed-skip",
                  "--find-unused-parameters",
                  "--optimizer",
                  "adam",
                  "--workers",
                  "0",
                  "--weight-decay",
                  "0.1",
                  "--devices",
                  cpus(2)};

#ifndef LOCKSTEP_DOUBLE  // which has no other precision
TEST_CASE("A run in 16 bits goes on with the bytes of one that never stopped, and in no other type",
          "[faults][checkpoint][sixteen]") {
  const Jobs jobs;
  // The scale of fp16 grows every third step, and its gradients overflow: it must be kept, too.
  for (const Words& type : {Words{"bf16"}, Words{"fp16", "--growth-interval", "3"}}) {
    INFO(type[0]);
    const TempDir saved;
    const Words precision = Words{"--precision"} + type;
    const Words all{"--devices", cpus(2), "--epochs", "2", "--clip-norm", "1"};
    const Words folder{"--checkpoint-dir", saved.path(), "--resume", "auto"};
    train(jobs, all + precision + Words{"--save", jobs / "straight"});
    const Words resumed = all + precision + folder;
    train(jobs, resumed + Words{"--max-steps", "7"});
    train(jobs, resumed + Words{"--save", jobs / "resumed"});
    CHECK((jobs.text("resumed") == jobs.text("straight")));
    const ProcessResult other = jobs.run_words(Words{stage05()} + kRun + all + folder);
    INFO(story(other));
    CHECK(other.status == 1);
    CHECK_THAT(other.err, ContainsSubstring("was saved with precision \"" + type[0] + "\""));
  }
}
#endif

TEST_CASE("A run goes on with each parameter's own count of steps", "[faults][checkpoint]") {
  const Jobs jobs;
  train(jobs, {"--max-steps", "6", "--save", jobs / "straight"}, kSkip);
  const Words resumed{"--checkpoint-dir", jobs / "saved", "--resume", "auto"};
  train(jobs, resumed + Words{"--max-steps", "3"}, kSkip);
  const auto saved = load_safetensors(optimizer_path(checkpoint_path(jobs / "saved", 3)));
  for (const auto& [name, steps] :
       std::map<std::string, Real>{{"extra.inner.weight", 2}, {"fc1.bias", 3}}) {
    const auto tensor = std::ranges::find(saved.tensors(), "step." + name, &TensorEntry::name);
    REQUIRE(tensor != saved.tensors().end());
    CHECK(tensor->shape.empty());  // as PyTorch has it
    CHECK(state_of({*tensor}, FileTypes::exact).at(0).real == std::vector<Real>{steps});
  }
  train(jobs, resumed + Words{"--max-steps", "6", "--save", jobs / "resumed"}, kSkip);
  CHECK((jobs.text("resumed") == jobs.text("straight")));
}

TEST_CASE("A run that goes on within an epoch logs on from there", "[faults][checkpoint]") {
  const Jobs jobs;
  const Words run{"--data",
                  "synthetic:120:10",
                  "--batch-size",
                  "12",
                  "--lr",
                  "0.01",
                  "--workers",
                  "0",
                  "--epochs",
                  "3",
                  "--devices",
                  cpus(2),
                  "--log-interval",
                  "2",
                  "--resume",
                  "auto",
                  "--checkpoint-dir",
                  jobs / "saved"};
  train(jobs, {"--max-steps", "13"}, run);
  const ProcessResult on = train(jobs, {"--max-steps", "22"}, run);
  // Three steps of the second epoch are done; every second batch of an epoch has a line.
  Words lines;
  for (const std::string& line : lines_of(on.out)) {
    if (line.starts_with("Train Epoch")) lines.push_back(line.substr(0, line.find('\t')));
  }
  CHECK(lines == Words{"Train Epoch: 2 [48/120 (40%)]", "Train Epoch: 2 [72/120 (60%)]",
                       "Train Epoch: 2 [96/120 (80%)]", "Train Epoch: 3 [0/120 (0%)]"});
}

TEST_CASE("Two runs do not save to one directory at a time", "[faults][checkpoint]") {
  const Jobs jobs;
  std::filesystem::create_directory(jobs / "saved");
  const Words run = Words{stage05()} + kRun + Words{"--max-steps",  "2",         "--checkpoint-dir",
                                                    jobs / "saved", "--devices", cpus(2)};
  const std::string lock = jobs / "saved/.lock";
  const ProcessResult second = jobs.run_words(Words{"flock", lock} + run);
  INFO(story(second));
  CHECK(second.status == 1);
  CHECK_THAT(second.err, ContainsSubstring("another run saves to it; wait"));
  CHECK(std::distance(std::filesystem::directory_iterator(jobs / "saved"), {}) == 1);  // the lock
  CHECK(int(std::filesystem::status(lock).permissions()) == 0600);
  // Nor does this run look for what the other one may be about to remove.
  write_file(jobs / "saved/step-000000001.safetensors", "damaged");
  const ProcessResult third =
      jobs.run_words(Words{"flock", lock} + run + Words{"--resume", "auto"});
  CHECK_THAT(third.err, ContainsSubstring("another run saves to it; wait"));
  CHECK(third.err.find("step-000000001") == std::string::npos);
  std::filesystem::remove(jobs / "saved/step-000000001.safetensors");
  // A lock that whoever may read the directory can have is none. Nobody has the file's any more.
  CHECK(jobs.run_words(Words{"flock", jobs / "saved"} + run).status == 0);
  CHECK_FALSE(std::filesystem::exists(lock));
  // A file of another kind, or of another user, is not waited for.
  REQUIRE(::mkfifo(lock.c_str(), 0666) == 0);
  CHECK_THAT(jobs.run_words(run).err,
             ContainsSubstring("the lock .lock is not a file of this user"));
  std::filesystem::remove(lock);
  std::filesystem::create_symlink(jobs / "elsewhere", lock);
  CHECK_THAT(jobs.run_words(run).err,
             ContainsSubstring("the lock .lock cannot be opened: Too many levels"));
  CHECK_FALSE(jobs.has("elsewhere"));
}

TEST_CASE("A checkpoint names the next step's learning rate and the best accuracy so far",
          "[faults][checkpoint][row106]") {
  const Jobs jobs;
  // Seven steps of warm-up, then half the rate after each of the epochs of ten steps.
  train(jobs, {"--devices", cpus(2), "--epochs", "4", "--warmup-epochs", "0.7", "--save-every", "5",
               "--keep", "100", "--checkpoint-dir", jobs / "saved", "--metrics", jobs / "metrics"});
  const std::vector<double> accuracy = read_json(jobs / "metrics").at("accuracy");
  REQUIRE(accuracy.size() == 4);
  const std::map<int64_t, double> rates{{5, 0.01 * 6 / 7}, {10, 0.005},   {15, 0.005},
                                        {20, 0.0025},      {25, 0.0025},  {30, 0.00125},
                                        {35, 0.00125},     {40, 0.000625}};
  for (const int64_t steps : find_checkpoints(jobs / "saved")) {
    INFO("after " << steps << " steps");
    const TrainingState state = TrainingState::from_json(
        read_checkpoint(checkpoint_path(jobs / "saved", steps)).training, "the checkpoint");
    CHECK(state.steps == steps);
    CHECK(state.epoch == steps / 10);
    CHECK(state.step_in_epoch == steps % 10);
    CHECK(state.learning_rate == Approx(rates.at(steps)));
    const auto evaluated = accuracy.begin() + state.epoch;
    CHECK(state.best_accuracy ==
          (state.epoch == 0 ? 0 : *std::max_element(accuracy.begin(), evaluated)));
    CHECK(state.world_size == 2);
  }
  CHECK(find_checkpoints(jobs / "saved").size() == rates.size());
}

/// The epochs of a run that is killed this often: it runs for some 100 ms before each kill.
int epochs_for(int kills) {
#if defined(__SANITIZE_ADDRESS__)
  return 4 + 3 * kills;  // a step takes ten times as long
#else
  return 20 + 15 * kills;
#endif
}

TEST_CASE("Ranks that are killed again and again end with the bytes of ranks that were not",
          "[faults][checkpoint]") {
  const int kills = full_campaign() ? 20 : 2;
  const Jobs jobs;
  const Words run =
      kRun + Words{"--devices", cpus(2), "--epochs", std::to_string(epochs_for(kills))};
  const ProcessResult straight =
      jobs.run_words(Words{stage05()} + run + Words{"--save", jobs / "straight"});
  INFO(story(straight));
  REQUIRE(straight.status == 0);

  auto running = jobs.begin({"--nproc-per-node", "2", "--max-restarts", std::to_string(kills)},
                            Words{stage05()} + run +
                                Words{"--save", jobs / "killed", "--checkpoint-dir", jobs / "saved",
                                      "--save-every", "4", "--resume", "auto"},
                            kDeadline * (1 + kills / 3));
  std::mt19937 random(20);
  for (int kill = 0; kill < kills; ++kill) {
    INFO("kill " << kill);
    const std::vector<pid_t> ranks = jobs.ranks(2, "05-syncbn-checkpoint");
    REQUIRE(ranks.size() == 2);
    // Not before it has resumed from where the last run was killed.
    const int64_t before = steps_saved(jobs / "saved");
    REQUIRE(soon(kDeadline, [&] { return steps_saved(jobs / "saved") > before; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 100));
    REQUIRE(::kill(ranks[random() % 2], SIGKILL) == 0);
    REQUIRE(soon(kSoon, [&] { return ::kill(ranks[0], 0) != 0 && ::kill(ranks[1], 0) != 0; }));
  }
  const ProcessResult end = running.get();
  INFO(story(end));
  CHECK(end.status == 0);
  CHECK_THAT(end.err, ContainsSubstring(fmt::format("restart {} of {}", kills, kills)));
  CHECK((jobs.text("killed") == jobs.text("straight")));
  CHECK(jobs.processes() == Words{});
}

TEST_CASE("A loss that is not finite leaves the last checkpoint as it was, and names the step",
          "[faults][checkpoint][row17]") {
  const Jobs jobs;
  // The rate climbs from 0: the first steps are good.
  const ProcessResult run =
      jobs.run_words({stage05(), "--devices", cpus(2), "--data", "synthetic:120:10", "--batch-size",
                      "12", "--lr", "1e12", "--warmup-epochs", "1", "--workers", "0",
                      "--checkpoint-dir", jobs / "saved", "--save-every", "1"});
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring("step ") && ContainsSubstring("rank ") &&
                          ContainsSubstring("the weights stayed as they were before"));
  const auto newest =
      newest_checkpoint(jobs / "saved", [](const std::string& line) { FAIL(line); });
  REQUIRE(newest);
  for (const StateTensor& tensor : newest->network) {
    for (const Real value : tensor.real) CHECK(std::isfinite(value));
  }
}

TEST_CASE("Where nothing can be written training goes on, and ends with what was not saved",
          "[faults][checkpoint][row116]") {
  const Jobs jobs;
  const TempDir saved;
  // No file may become larger than 16 blocks of 512 bytes: the disk is full.
  const ProcessResult run = jobs.run_words(
      Words{"sh", "-c", "trap '' XFSZ; ulimit -f 16; exec \"$@\"", "sh", stage05()} + kRun +
      Words{"--devices", cpus(2), "--checkpoint-dir", saved.path(), "--save-every", "5"});
  INFO(story(run));
  CHECK(run.status == 1);
  for (const char* rank : {"rank 0", "rank 1"}) {
    CHECK_THAT(run.err, ContainsSubstring(fmt::format("warning: {}: step 5 is not saved", rank)));
  }
  CHECK_THAT(run.err, ContainsSubstring("File too large"));
  CHECK_THAT(run.err, ContainsSubstring("the last checkpoint is missing"));
  CHECK_THAT(run.out, ContainsSubstring("test accuracy"));  // it trained to its end
  CHECK(saved.names() == Words{".lock"});  // without a lock: an error ends the process at once
}

TEST_CASE("What cannot be resumed is refused before the first step, by all ranks",
          "[faults][checkpoint][row119]") {
  const Jobs jobs;
  const Words saved{"--checkpoint-dir", jobs / "saved"};
  train(jobs, saved + Words{"--devices", cpus(2)});
  const auto refused = [&](const Words& options, const std::string& text) {
    const ProcessResult run = jobs.run_words(Words{stage05()} + kRun + options);
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring(text));
    CHECK(run.out.find("Train Epoch") == std::string::npos);
    CHECK(jobs.processes() == Words{});
    CHECK_FALSE(std::filesystem::exists(jobs / "saved/.lock"));
  };
  const Words two = saved + Words{"--devices", cpus(2), "--epochs", "2"};
  const Words one = saved + Words{"--devices", cpus(1), "--epochs", "2"};
  refused(one + Words{"--resume", "auto"}, "was saved by 2 ranks, this run has 1");
  refused(two, "is later than the beginning");
  refused(two + Words{"--resume", "auto", "--weight-decay", "0.1"}, "weight_decay");
  refused(two + Words{"--resume", "auto", "--no-sync-bn"}, "sync_bn");
  refused(two + Words{"--resume", jobs / "nothing"}, "nothing");
  refused(
      {"--devices", cpus(2), "--checkpoint-dir", jobs / "new/one", "--resume", jobs / "nothing"},
      "nothing");
  CHECK_FALSE(std::filesystem::exists(jobs / "new"));
  refused({"--devices", cpus(2), "--resume", "auto"}, "--resume auto: looks in --checkpoint-dir");
  refused({"--devices", cpus(2), "--keep", "3"}, "--keep: nothing is saved without");
  refused({"--devices", cpus(2), "--checkpoint-dir", stage05()}, stage05());
  // From then on they are the checkpoints of one rank.
  train(jobs, one + Words{"--resume", "auto", "--allow-world-size-change"});
  refused(two + Words{"--resume", "auto"}, "was saved by 1 rank, this run has 2");
}

/// A training at a learning rate that it does not survive.
Words diverging(int ranks, const std::string& learning_rate) {
  return {stage05(),   "--devices", cpus(ranks), "--data",     "synthetic:640:20",
          "--workers", "0",         "--lr",      learning_rate};
}

TEST_CASE("A rank alone is named when its loss is not finite", "[faults][checkpoint][row17]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(diverging(1, "1e12"));
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring("rank 0 (cpu:0): the loss ("));
}

TEST_CASE("Ranks that were told to save differently are told so before the first step",
          "[faults][checkpoint]") {
  const Jobs jobs;
  const std::string rank_differs =
      "if [ $RANK = 1 ]; then exec \"$@\" --save-every 4; else exec \"$@\" --save-every 5; fi";
  const ProcessResult run =
      jobs.begin({"--nproc-per-node", "2"}, Words{"sh", "-c", rank_differs, "sh", stage05()} +
                                                kRun + Words{"--checkpoint-dir", jobs / "saved"})
          .get();
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring("save_every: rank 0 has 5, rank 1 has 4"));
}

TEST_CASE("A run whose running statistics overflow ends with its good checkpoints",
          "[faults][checkpoint]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(
      diverging(2, "1000") + Words{"--checkpoint-dir", jobs / "saved", "--save-every", "1"});
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring("which is not finite; nothing was saved"));
  const auto newest = newest_checkpoint(jobs / "saved", [](const std::string&) {});
  REQUIRE(newest);
  for (const StateTensor& tensor : newest->network) {
    for (const Real x : tensor.real) REQUIRE(std::isfinite(x));
  }
}

}  // namespace
}  // namespace lockstep
