// Stage 06's runs that end early, and resume; and what becomes of their checkpoints.

#include <signal.h>

#include <cmath>
#include <random>

#include "05-syncbn-checkpoint/checkpoint.h"
#include "common/io/safetensors.h"
#include "tests/support/catch.h"
#include "tests/support/jobs.h"
#include "tests/support/json.h"
#include "tests/support/machine.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;
namespace fs = std::filesystem;

std::string stage06() { return stage_binary("06-fully-sharded"); }
std::string join_weights() { return build_dir() + "/06-fully-sharded/join-weights"; }

/// Ten steps of 12 samples per epoch, with everything that a run remembers.
const Words kRun{"--model",      "seed-bn",   "--data", "synthetic:120:10",
                 "--batch-size", "12",        "--lr",   "0.01",
                 "--dropout",    "--lr-step", "1",      "--lr-gamma",
                 "0.5",          "--workers", "0",      "--log-interval",
                 "1000"};
const Words kMomentum{"--momentum", "0.9"};
const Words kAdamW{"--optimizer", "adamw", "--weight-decay", "0.01", "--eps", "1e-3"};

/// A run of a stage that must end well.
ProcessResult train(const Jobs& jobs, const Words& options, const std::string& stage = stage06()) {
  const ProcessResult run = jobs.run_words(Words{stage} + kRun + options);
  INFO(story(run));
  REQUIRE(run.status == 0);
  CHECK(jobs.processes() == Words{});
  return run;
}

/// A command that must be refused in one line that has these words.
void refused(const Jobs& jobs, const Words& command, const std::string& text) {
  const ProcessResult run = jobs.run_words(command);
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring(text));
  CHECK(run.out.find("Train Epoch") == std::string::npos);
}

/// Of all weights together: the distance to `expected`, divided by its length.
double relative_distance(const fs::path& found, const fs::path& expected) {
  const Weights a = read_weights(found), b = read_weights(expected);
  REQUIRE(a.size() == b.size());
  double difference = 0, length = 0;
  for (const auto& [name, values] : b) {
    for (size_t i = 0; i < values.size(); ++i) {
      difference += std::pow(a.at(name).at(i) - values[i], 2);
      length += values[i] * values[i];
    }
  }
  return std::sqrt(difference / length);
}

int64_t newest_step(const fs::path& directory) {
  const auto found = find_checkpoints(directory);
  return found.empty() ? 0 : found.front();
}

TEST_CASE("A sharded run that goes on ends with the bytes of one that never stopped",
          "[faults][sharded][checkpoint][row107][row109]") {
  for (const Words& optimizer :
       full_campaign() ? std::vector<Words>{kMomentum, kAdamW} : std::vector<Words>{kAdamW}) {
    const Jobs jobs;
    const Words all = optimizer + Words{"--devices", cpus(2)};
    train(jobs, all + Words{"--epochs", "4", "--save", jobs / "straight"});
    const Words resumed =
        all + Words{"--checkpoint-dir", jobs / "saved", "--resume", "auto", "--save-every", "3"};
    train(jobs, resumed + Words{"--epochs", "2"});
    train(jobs, resumed + Words{"--epochs", "4", "--max-steps", "27"});
    CHECK(newest_step(jobs / "saved") == 27);
    train(jobs, resumed + Words{"--epochs", "4", "--save", jobs / "resumed"});
    CHECK((jobs.text("resumed") == jobs.text("straight")));
    // There is nothing left to do: the same weights, evaluated.
    const ProcessResult again = train(
        jobs,
        resumed + Words{"--epochs", "4", "--save", jobs / "again", "--metrics", jobs / "metrics"});
    CHECK_THAT(again.out, ContainsSubstring("Nothing is left to train: --epochs is 4"));
    CHECK(read_json(jobs / "metrics").at("accuracy").size() == 1);
    CHECK((jobs.text("again") == jobs.text("straight")));
    CHECK(find_checkpoints(jobs / "saved").size() == 2);
    // What --save writes is what join-weights makes of the last checkpoint.
    const fs::path last = checkpoint_path(jobs / "saved", 40);
    const TrainingState state =
        TrainingState::from_json(load_safetensors(last).metadata().at(kTrainingKey), "the last");
    CHECK(state.learning_rate == Approx(0.01 / 16));  // of the next step
    CHECK(state.best_accuracy >= read_json(jobs / "metrics").at("accuracy").at(0).get<double>());
    REQUIRE(jobs.run_words({join_weights(), last, jobs / "joined"}).status == 0);
    CHECK((jobs.text("joined") == jobs.text("straight")));
  }
}

#ifndef LOCKSTEP_DOUBLE  // which has no other precision
TEST_CASE("A sharded run in 16 bits goes on with the bytes of one that never stopped",
          "[faults][sharded][checkpoint][sixteen]") {
  const Jobs jobs;
  // The scale of fp16 grows every third step, and its gradients overflow: it must be kept, too.
  for (const Words& type : {Words{"bf16", "--shard", "none"},
                            Words{"fp16", "--growth-interval", "3", "--shard", "parameters"}}) {
    INFO(type[0]);
    const TempDir saved;
    const Words all =
        kMomentum + Words{"--devices", cpus(2), "--epochs", "2", "--precision"} + type;
    train(jobs, all + Words{"--save", jobs / "straight"});
    const Words resumed = all + Words{"--checkpoint-dir", saved.path(), "--resume", "auto"};
    train(jobs, resumed + Words{"--max-steps", "7"});
    train(jobs, resumed + Words{"--save", jobs / "resumed"});
    CHECK((jobs.text("resumed") == jobs.text("straight")));
  }
}
#endif

TEST_CASE("A sharded run goes on with each parameter's own count of steps, and logs on from there",
          "[faults][sharded][checkpoint]") {
  check_goes_on(Jobs(),
                {stage06(), "--data", "synthetic:120:10", "--workers", "0", "--devices", cpus(2)});
}

TEST_CASE("A sharded run whose numbers overflow says so before it saves them",
          "[faults][sharded][checkpoint]") {
  const Jobs jobs;
  const auto run = [&](const Words& options) {
    const ProcessResult result = jobs.run_words(
        Words{stage06(), "--data", "synthetic:120:10", "--batch-size", "12", "--workers", "0",
              "--model", "seed-bn", "--optimizer", "sgd", "--devices", cpus(2), "--checkpoint-dir",
              jobs / "saved", "--save-every", "1"} +
        options);
    INFO(story(result));
    CHECK(result.status == 1);
    return result.err;
  };
  // Running statistics before the loss; then a loss, at a rate that climbs from 0.
  CHECK_THAT(run({"--lr", "1000"}), ContainsSubstring("which is not finite; nothing was saved"));
  std::filesystem::remove_all(jobs / "saved");
  CHECK_THAT(run({"--lr", "1e12", "--warmup-epochs", "1"}),
             ContainsSubstring("the weights stayed as they were before that step"));
}

TEST_CASE("A sharded run goes on with other ranks, another way and other units, up to rounding",
          "[faults][sharded][checkpoint][row119]") {
  struct Way {
    int before, after;
    Words options_before, options_after;
  };
  const std::vector<Way> ways{
      {4, 2, {}, {"--shard", "optimizer"}},
      {2, 3, {"--shard", "none"}, {"--unit", "model"}},
      {2, 2, {"--unit", "0.01"}, {"--shard", "gradients", "--unit", "block"}}};
  const Jobs jobs;
  train(jobs, kAdamW + Words{"--devices", cpus(2), "--epochs", "2", "--save", jobs / "straight"});
  for (const Way& way : ways) {
    INFO(way.before << " and " << way.after << " ranks");
    const TempDir saved;
    const Words all = kAdamW + Words{"--checkpoint-dir", saved.path(), "--epochs", "2"};
    train(jobs,
          all + way.options_before + Words{"--devices", cpus(way.before), "--max-steps", "13"});
    const Words more =
        all + way.options_after +
        Words{"--devices", cpus(way.after), "--resume", "auto", "--save", jobs / "resumed"};
    if (way.before != way.after) {
      refused(jobs, Words{stage06()} + kRun + more,
              fmt::format("was saved by {} ranks", way.before));
    }
    train(jobs, more + (way.before == way.after ? Words{} : Words{"--allow-world-size-change"}));
    // Float32: four ranks add in another order than two. Where that changes which of two nearly
    // equal pixels is the maximum, the run takes another way: after 20 steps it was 3e-5 away on
    // one processor, 5e-4 on another (3e-15 in float64). Steps 14 to 20 move the weights by 0.35.
    CHECK(relative_distance(jobs / "resumed", jobs / "straight") < 5e-3);
  }
}

TEST_CASE("Sharded runs that are killed while they save end with the bytes of one that was not",
          "[faults][sharded][checkpoint][row115]") {
#if defined(__SANITIZE_ADDRESS__)
  const int kills = full_campaign() ? 20 : 5;  // four seconds each
#else
  const int kills = full_campaign() ? 100 : 5;
#endif
  const Jobs jobs;
  const Words run = kRun + kMomentum + Words{"--devices", cpus(2), "--epochs", "100000"};
  const Words saving =
      Words{stage06()} + run +
      Words{"--checkpoint-dir", jobs / "saved", "--save-every", "1", "--resume", "auto"};
  std::mt19937 random(24);
  for (int kill = 0; kill < kills; ++kill) {
    INFO("kill " << kill);
    const int64_t before = newest_step(jobs / "saved");
    auto running = jobs.begin({"--nproc-per-node", "2"}, saving);
    const std::vector<pid_t> ranks = jobs.ranks(2, "06-fully-sharded");
    REQUIRE(ranks.size() == 2);
    REQUIRE(soon(kDeadline, [&] { return newest_step(jobs / "saved") > before; }));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
    REQUIRE(::kill(ranks[random() % 2], SIGKILL) == 0);
    const ProcessResult killed = running.get();
    INFO(story(killed));
    CHECK(killed.status != 0);
    // What the next run goes on from is the newest, and it is whole.
    CHECK(killed.err.find("is tried") == std::string::npos);
  }
  const int64_t end = newest_step(jobs / "saved") + 3;
  const Words to_the_end{"--max-steps", std::to_string(end)};
  train(jobs, kMomentum + Words{"--devices", cpus(2), "--epochs", "100000"} + to_the_end +
                  Words{"--save", jobs / "straight"});
  const ProcessResult last = jobs.run_words(saving + to_the_end + Words{"--save", jobs / "killed"});
  INFO(story(last));
  REQUIRE(last.status == 0);
  CHECK(last.err.find("is tried") == std::string::npos);
  CHECK((jobs.text("killed") == jobs.text("straight")));
  CHECK(find_checkpoints(jobs / "saved").size() == 2);
  // Nothing is left of the saves that were killed.
  CHECK(std::distance(fs::directory_iterator(jobs / "saved"), {}) == 6);
}

TEST_CASE("A damaged, truncated or missing shard is named, and the checkpoint before it taken",
          "[faults][sharded][checkpoint][row113]") {
  const Jobs jobs;
  const Words all = kMomentum + Words{"--devices", cpus(2), "--epochs", "2"};
  train(jobs, all + Words{"--save", jobs / "straight", "--checkpoint-dir", jobs / "good"});
  const auto damage = [&](const std::string& how, const fs::path& shard) {
    if (how == "missing") {
      fs::remove(shard);
    } else if (how == "truncated") {
      fs::resize_file(shard, fs::file_size(shard) - 1);
    } else {
      std::string bytes = read_text(shard);
      bytes[bytes.size() - 3] = char(bytes[bytes.size() - 3] ^ 16);
      write_file(shard, bytes);
    }
  };
  for (const std::string how : {"damaged", "truncated", "missing"}) {
    INFO(how);
    const fs::path saved = jobs / how;
    fs::copy(jobs / "good", saved);
    const fs::path newest = checkpoint_path(saved, 20);
    damage(how, shard_path(newest, 1, 2));
    const std::string words = how == "damaged"     ? "has the checksum"
                              : how == "truncated" ? "the file is truncated"
                                                   : "is missing, shard ";
    const Words resumed = all + Words{"--save", jobs / "resumed"};
    refused(jobs, Words{stage06()} + kRun + resumed + Words{"--resume", newest}, words);
    refused(jobs, {join_weights(), newest, jobs / "joined"}, words);
    refused(jobs, {join_weights(), newest, "--checkpoint-dir", jobs / "joined"}, words);
    CHECK(!jobs.has("joined"));
    const ProcessResult run =
        train(jobs, resumed + Words{"--checkpoint-dir", saved, "--resume", "auto"});
    CHECK_THAT(run.err, ContainsSubstring("rank-1-of-2.safetensors") && ContainsSubstring(words) &&
                            ContainsSubstring("the one before it is tried"));
    CHECK_THAT(run.out, ContainsSubstring("10 steps, 0 of them in epoch 2"));
    CHECK((jobs.text("resumed") == jobs.text("straight")));
  }
}

TEST_CASE("Where a rank's shard cannot be written training goes on, and says so at its end",
          "[faults][sharded][checkpoint][row116]") {
  const Jobs jobs;
  const TempDir saved;
  // No file may become larger than 16 blocks of 512 bytes: the disk is full.
  const ProcessResult run = jobs.run_words(
      Words{"sh", "-c", "trap '' XFSZ; ulimit -f 16; exec \"$@\"", "sh", stage06()} + kRun +
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

TEST_CASE("Joined shards have the run's accuracy in stage 01, and each program says what to type",
          "[faults][sharded][checkpoint]") {
  const Jobs jobs;
  const Words one_epoch{"--epochs", "1", "--checkpoint-dir", jobs / "saved"};
  train(jobs, one_epoch + Words{"--devices", cpus(2), "--metrics", jobs / "run"});
  const fs::path checkpoint = checkpoint_path(jobs / "saved", 10);
  const ProcessResult joined = jobs.run_words({join_weights(), checkpoint, jobs / "joined"});
  INFO(story(joined));
  REQUIRE(joined.status == 0);
  CHECK_THAT(joined.out, ContainsSubstring("Joined 2 shards of " + checkpoint.string()));
  const Words evaluated{stage_binary("01-single-gpu"),
                        "--devices",
                        "cpu:0",
                        "--model",
                        "seed-bn",
                        "--data",
                        "synthetic:120:10",
                        "--epochs",
                        "0",
                        "--workers",
                        "0"};
  const ProcessResult stage01 = jobs.run_words(
      evaluated + Words{"--load", jobs / "joined", "--metrics", jobs / "evaluation"});
  INFO(story(stage01));
  REQUIRE(stage01.status == 0);
  CHECK(read_json(jobs / "evaluation").at("accuracy") == read_json(jobs / "run").at("accuracy"));
  // And so has stage 06, which reads them a parameter at a time.
  train(jobs, {"--devices", cpus(2), "--epochs", "0", "--load", jobs / "joined", "--save",
               jobs / "again"});
  CHECK((jobs.text("again") == jobs.text("joined")));

  const std::string command = "build/06-fully-sharded/join-weights " + checkpoint.string() + " OUT";
  const Words stage05{stage_binary("05-syncbn-checkpoint"), "--devices", cpus(2), "--data",
                      "synthetic:120:10"};
  refused(jobs, stage05 + Words{"--resume", checkpoint}, command);
  refused(jobs, stage05 + Words{"--load", checkpoint}, command);
  refused(jobs, evaluated + Words{"--load", checkpoint}, command);
  refused(jobs, evaluated + Words{"--load", shard_path(checkpoint, 0, 2)}, command);
  refused(jobs, {join_weights(), jobs / "joined", jobs / "out"}, "found no lockstep.training");
  const std::string of_stage05 = jobs / "whole/step-000000001.safetensors";
  train(jobs, {"--devices", cpus(2), "--max-steps", "1", "--checkpoint-dir", jobs / "whole"},
        stage_binary("05-syncbn-checkpoint"));
  refused(jobs, {join_weights(), of_stage05, jobs / "out"}, "whole weights need no joining");
  refused(jobs, {join_weights(), jobs / "nothing", jobs / "out"}, "cannot open");
  refused(jobs, {join_weights(), checkpoint}, "join-weights: found one file, expected two");
  refused(jobs, {join_weights(), checkpoint, jobs / "out", "--checkpoint-dir", jobs / "folder"},
          "expected one of them; leave the other out");
  refused(jobs, {join_weights(), checkpoint, shard_path(checkpoint, 0, 2)}, "give another name");
  refused(jobs,
          {join_weights(), checkpoint, "--checkpoint-dir", jobs / "folder", "--dtype", "bf16"},
          "--dtype: bf16 is for OUT");
  CHECK(!jobs.has("out"));

  const ProcessResult half =
      jobs.run_words({join_weights(), checkpoint, jobs / "half", "--dtype", "bf16"});
  INFO(story(half));
  REQUIRE(half.status == 0);
  CHECK(double(fs::file_size(jobs / "half")) < 0.6 * double(fs::file_size(jobs / "joined")));
  const ProcessResult measured = jobs.run_words(evaluated + Words{"--load", jobs / "half"});
  INFO(story(measured));
  CHECK(measured.status == 0);
}

TEST_CASE("Shards joined in a folder are a checkpoint from which stage 05 goes on",
          "[faults][sharded][checkpoint]") {
  for (const Words& optimizer : {kMomentum, kAdamW}) {
    const Jobs jobs;
    const Words all = optimizer + Words{"--devices", cpus(2), "--epochs", "2"};
    train(jobs, all + Words{"--save", jobs / "straight"});
    train(jobs, all + Words{"--checkpoint-dir", jobs / "shards", "--max-steps", "13"});
    const fs::path shards = checkpoint_path(jobs / "shards", 13), whole = jobs / "whole";
    const Words join{join_weights(), shards, "--checkpoint-dir"};
    const ProcessResult joined = jobs.run_words(join + Words{whole});
    INFO(story(joined));
    REQUIRE(joined.status == 0);
    CHECK(std::distance(fs::directory_iterator(whole), {}) == 2);  // no lock is left
    const Words resumed =
        Words{"--checkpoint-dir", whole, "--resume", "auto", "--save", jobs / "resumed"};
    // The number of ranks, and the other settings, are those of the run that saved.
    refused(jobs,
            Words{stage_binary("05-syncbn-checkpoint")} + kRun + optimizer + resumed +
                Words{"--devices", "cpu:0"},
            "was saved by 2 ranks, this run has 1");
    const ProcessResult run = train(jobs, all + resumed, stage_binary("05-syncbn-checkpoint"));
    CHECK_THAT(run.out, ContainsSubstring("13 steps, 3 of them in epoch 2"));
    CHECK(relative_distance(jobs / "resumed", jobs / "straight") < 1e-5);
  }
}

TEST_CASE("Shards are joined in a folder without checkpoints, or nothing is written",
          "[faults][sharded][checkpoint]") {
  const Jobs jobs;
  train(jobs, kAdamW + Words{"--devices", cpus(2), "--checkpoint-dir", jobs / "shards",
                             "--max-steps", "3"});
  const fs::path shards = checkpoint_path(jobs / "shards", 3);
  const auto files = [&] { return std::distance(fs::directory_iterator(jobs / "shards"), {}); };
  const auto before = files();
  const std::string own = read_text(shards);
  refused(jobs, {join_weights(), shards, "--checkpoint-dir", jobs / "shards"},
          shards.string() + " is there, expected no checkpoint; give an empty folder");
  CHECK(files() == before);
  CHECK((read_text(shards) == own));
  // The disk is full: the optimizer's file, which is written first, does not fit.
  const ProcessResult full =
      jobs.run_words({"sh", "-c", "trap '' XFSZ; ulimit -f 16; exec \"$@\"", "sh", join_weights(),
                      shards, "--checkpoint-dir", jobs / "new"});
  INFO(story(full));
  CHECK(full.status == 1);
  CHECK_THAT(full.err, ContainsSubstring("File too large"));
  CHECK(!jobs.has("new"));
}

}  // namespace
}  // namespace lockstep
