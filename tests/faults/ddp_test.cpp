// Stage 04 under real launchers, on two hosts, and with ranks that die.

#include <fmt/ranges.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <random>

#include "tests/support/catch.h"
#include "tests/support/free_port.h"
#include "tests/support/jobs.h"
#include "tests/support/json.h"
#include "tests/support/machine.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;

const Words kFewSteps{"--data", "synthetic:120:10", "--batch-size", "12",        "--lr",
                      "0.01",   "--order",          "sampler",      "--workers", "0"};

std::string ddp() { return stage_binary("04-ddp"); }

/// The bytes of the weights that a command leaves; its other files are in the same folder.
std::string weights_of(const Jobs& jobs, const Words& command, const std::string& name) {
  const ProcessResult run = jobs.run_words(command + kFewSteps + Words{"--save", jobs / name});
  INFO(story(run));
  REQUIRE(run.status == 0);
  CHECK(jobs.processes() == Words{});
  return jobs.text(name);
}

std::string expected_weights(const Jobs& jobs) {
  return weights_of(jobs, {ddp(), "--devices", cpus(2)}, "expected");
}

/// The first of these programs that PATH has; "" if it has none.
std::string in_path(const std::string& program) {
  std::istringstream folders(std::getenv("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (::access((folder + "/" + program).c_str(), X_OK) == 0) return folder + "/" + program;
  }
  return "";
}

// --- Launchers -----------------------------------------------------------------------------------

TEST_CASE("Every launcher leads to the same weights", "[faults][ddp]") {
  const Jobs jobs;
  const std::string expected = expected_weights(jobs);
  CHECK(
      (weights_of(jobs, {jobs.launcher(), "--nproc-per-node", "2", ddp()}, "launch") == expected));
  // By hand, rank 0 in the background, the address as an option.
  const std::string script =
      "\"$@\" --rank 0 & \"$@\" --rank 1 || exit 1; wait $! && test -s \"$DIR/by-hand\"";
  CHECK((weights_of(jobs,
                    {"sh", "-c", script, "sh", ddp(), "--world-size", "2", "--local-rank", "0",
                     "--init-method", fmt::format("tcp://127.0.0.1:{}", free_port())},
                    "by-hand") == expected));
  // Without a launcher the program starts itself, whatever the name it was called by.
  CHECK((weights_of(jobs,
                    {"bash", "-c", "exec -a renamed \"$@\"", "bash", ddp(), "--devices", cpus(2)},
                    "renamed") == expected));
}

TEST_CASE("Under mpirun the weights are those of our launcher", "[faults][ddp][mpirun]") {
  if (in_path("mpirun").empty()) LOCKSTEP_SKIP("no mpirun");
  const Jobs jobs;
  const Words mpirun{"env",    "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                     "mpirun", "--oversubscribe",          "-np",
                     "2"};
  CHECK((weights_of(jobs,
                    mpirun + Words{"-x", "MASTER_ADDR=127.0.0.1", "-x",
                                   fmt::format("MASTER_PORT={}", free_port()), ddp()},
                    "mpirun") == expected_weights(jobs)));
  const ProcessResult unaddressed = jobs.run_words(mpirun + Words{ddp()} + kFewSteps);
  CHECK(unaddressed.status != 0);
  CHECK_THAT(unaddressed.err, ContainsSubstring("MASTER_ADDR"));
  CHECK_THAT(unaddressed.err, ContainsSubstring("mpirun"));
}

TEST_CASE("Under MPICH's mpiexec the weights are those of our launcher", "[faults][ddp][mpirun]") {
  if (in_path("mpiexec.mpich").empty()) LOCKSTEP_SKIP("no mpiexec.mpich");
  const Jobs jobs;
  const Words mpiexec{"mpiexec.mpich", "-n", "2"};
  CHECK((weights_of(jobs,
                    mpiexec + Words{"-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT",
                                    fmt::format("{}", free_port()), ddp()},
                    "mpiexec") == expected_weights(jobs)));
  const ProcessResult unaddressed = jobs.run_words(mpiexec + Words{ddp()} + kFewSteps);
  CHECK(unaddressed.status != 0);
  CHECK_THAT(unaddressed.err,
             ContainsSubstring("MASTER_ADDR") &&
                 ContainsSubstring("mpiexec.hydra -n 2 -genv MASTER_ADDR 127.0.0.1"));
  CHECK_THAT(unaddressed.out, !ContainsSubstring("starting"));
  // One process is a bare start.
  CHECK((weights_of(jobs, {"mpiexec.mpich", "-n", "1", ddp(), "--devices", cpus(2)}, "one") ==
         expected_weights(jobs)));
}

TEST_CASE("Copies that a launcher starts which is not known refuse to be two whole jobs",
          "[faults][ddp]") {
  const Jobs jobs;
  const ProcessResult run =
      jobs.run_words(Words{"env", "FLUX_TASK_RANK=1", ddp(), "--save", jobs / "weights"});
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK(run.out.empty());
  CHECK_THAT(run.err, ContainsSubstring("FLUX_TASK_RANK=1: Flux started this process as one of"));
  CHECK_FALSE(jobs.has("weights"));
}

TEST_CASE("Under torchrun the weights are those of our launcher", "[faults][ddp][torchrun]") {
  const char* named = std::getenv("LOCKSTEP_TORCHRUN");
  const std::string torchrun = named != nullptr ? named : in_path("torchrun");
  if (torchrun.empty()) LOCKSTEP_SKIP("no torch");
  const Jobs jobs;
  CHECK((weights_of(
             jobs,
             {torchrun, "--no-python", "--nproc-per-node", "2", "--master-port", "29519", ddp()},
             "torchrun") == expected_weights(jobs)));
}

TEST_CASE("Two hosts lead to the weights of one", "[faults][ddp][twohosts]") {
  const Jobs jobs;
  const Words two_hosts{"env", "LOCKSTEP_LAUNCHER=" + jobs.launcher(),
                        LOCKSTEP_SOURCE "/tools/two-hosts"};
  const ProcessResult permitted = jobs.run_words(two_hosts + Words{"true"});
  if (permitted.status == 77) LOCKSTEP_SKIP("namespaces not permitted");
  REQUIRE(permitted.status == 0);
  const std::string expected = expected_weights(jobs);
  CHECK((weights_of(jobs, two_hosts + Words{ddp()}, "launchers") == expected));
  CHECK((weights_of(jobs, two_hosts + Words{ddp(), "--backend", "tcp"}, "tcp") == expected));
  const Words tcp{"--init-method", "tcp://10.77.0.1:29600"};  // host 0
  CHECK((weights_of(jobs, two_hosts + Words{ddp()} + tcp, "tcp") == expected));
}

// --- Ranks that die ------------------------------------------------------------------------------

/// Starts three ranks that train forever.
std::future<ProcessResult> begin_training(const Jobs& jobs, const Words& launch_options,
                                          const Words& options = {}) {
  return jobs.begin(
      launch_options + Words{"--nproc-per-node", "3"},
      Words{ddp(), "--data", "synthetic:256:10", "--epochs", "100000", "--log-interval", "1",
            "--lr", "0.0001", "--batch-size", "12", "--workers", "0"} +
          options);
}

TEST_CASE("A rank that is killed while it trains is named, and all is over within a second",
          "[faults][ddp][row67][row125]") {
  std::mt19937 random(20);
  for (int turn = 0; turn < (full_campaign() ? 20 : 3); ++turn) {
    const Jobs jobs;
    auto running = begin_training(jobs, {});
    const std::vector<pid_t> ranks = jobs.ranks(3, "04-ddp");
    REQUIRE(ranks.size() == 3);
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 600));
    const size_t victim = random() % 3;
    REQUIRE(::kill(ranks[victim], SIGKILL) == 0);
    const auto begin = Clock::now();
    const ProcessResult run = running.get();
    INFO(story(run));
    CHECK(seconds_since(begin) < promised(1));
    CHECK(run.status == 128 + SIGKILL);
    CHECK_THAT(run.err,
               ContainsSubstring(fmt::format("error: rank {} (pid {}) was killed by signal 9",
                                             victim, ranks[victim])));
    CHECK(jobs.processes() == Words{});
  }
}

/// Whether ranks whose output goes to the folder "out" have soon made a step.
bool trains(const Jobs& jobs, const std::string& file) {
  return soon(kSoon, [&] {
    return std::filesystem::exists(jobs / "out" / file) &&
           jobs.text("out/" + file).find("Train Epoch: 1 [12/256") != std::string::npos;
  });
}

TEST_CASE("After a kill the ranks train again within moments", "[faults][ddp]") {
  const Jobs jobs;
  auto running = begin_training(jobs, {"--max-restarts", "1", "--redirect", jobs / "out"});
  const std::vector<pid_t> ranks = jobs.ranks(3, "04-ddp");
  REQUIRE(ranks.size() == 3);
  REQUIRE(trains(jobs, "rank_0.out"));
  const auto begin = Clock::now();
  REQUIRE(::kill(ranks[1], SIGKILL) == 0);
  CHECK(trains(jobs, "rank_0.restart_1.out"));
  CHECK(seconds_since(begin) < promised(1.5));
  for (const std::string& process : jobs.processes()) {
    if (process.ends_with(" launch")) ::kill(std::stoi(process), SIGTERM);
  }
  CHECK(running.get().status == -SIGTERM);
  CHECK(jobs.processes() == Words{});
}

// Whichever that is: an all-reduce of a step, or what an evaluation begins with.
TEST_CASE("A rank that stands still is named with the collective that misses it",
          "[faults][ddp][row68]") {
  const Jobs jobs;
  auto running = begin_training(jobs, {"--redirect", jobs / "out"}, {"--timeout", "2"});
  const std::vector<pid_t> ranks = jobs.ranks(3, "04-ddp");
  REQUIRE(ranks.size() == 3);
  REQUIRE(trains(jobs, "rank_0.out"));
  REQUIRE(::kill(ranks[2], SIGSTOP) == 0);
  const auto begin = Clock::now();
  const ProcessResult run = running.get();
  INFO(story(run));
  CHECK(seconds_since(begin) < 2 + promised(4));
  CHECK(run.status != 0);
  const std::string told = jobs.text("out/rank_0.err") + jobs.text("out/rank_1.err");
  CHECK_THAT(told, ContainsSubstring("collective ") && ContainsSubstring("rank 2"));
  // Not the ranks that gave it up.
  CHECK_THAT(run.err, StartsWith(fmt::format("error: rank 2 (pid {}) was stopped", ranks[2])));
  CHECK(jobs.processes() == Words{});
}

// --- Mistakes ------------------------------------------------------------------------------------

TEST_CASE("A loss that is not finite stops all ranks in the same step, and nothing is saved",
          "[faults][ddp][row89]") {
  const Jobs jobs;
  const ProcessResult run =
      jobs.run_words(Words{jobs.launcher(), "--nproc-per-node", "2", ddp(), "--data",
                           "synthetic:120:10", "--lr", "1e12", "--save", jobs / "weights"});
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring("step 1, rank 0 (cpu:0), rank 1 (cpu:1): the loss"));
  CHECK(std::ranges::count(run.err, '\n') == 1);
  CHECK(jobs.names() == Words{});
}

TEST_CASE("Ranks that were started with different options or data are told so, once",
          "[faults][ddp][row86]") {
  const Jobs jobs;
  for (const auto& [first, second, text] : std::vector<std::array<std::string, 3>>{
           {"--lr 0.1", "--lr 0.2", "lr: rank 0 has 0.1, rank 1 has 0.2"},
           {"--batch-size 12", "--batch-size 24", "batch_size: rank 0 has 12, rank 1 has 24"},
           {"--epochs 1", "--epochs 2", "epochs: rank 0 has 1, rank 1 has 2"},
           {"--bucket-mb 0", "--bucket-mb 1", "bucket_mb: rank 0 has 0.0, rank 1 has 1.0"},
           {"--accumulate 2", "", "accumulate: rank 0 has 2, rank 1 has 1"},
           {"--ddp manual", "--ddp bucketed",
            "ddp: rank 0 has \"manual\", rank 1 has \"bucketed\""},
           {"--data synthetic:120:10", "--data synthetic:240:10", "data: rank 0 has"}}) {
    INFO(first << " and " << second);
    const std::string script = "[ $RANK = 0 ] && exec \"$0\" " + first + "; exec \"$0\" " + second;
    const ProcessResult run = jobs.run_words(
        {jobs.launcher(), "--nproc-per-node", "2", "sh", "-c", script + " --workers 0", ddp()});
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK(run.err.find(text) != std::string::npos);
    CHECK(std::ranges::count(run.err, '\n') == 1);
    CHECK(jobs.processes() == Words{});
  }
}

TEST_CASE("A test set smaller than the world is refused by name", "[faults][ddp][row97]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(
      {ddp(), "--devices", cpus(3), "--data", "synthetic:120:2", "--batch-size", "12"});
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring("2 test images for 3 ranks"));
}

TEST_CASE("A rank's closed stdout is an error, and never one of its connections", "[faults][ddp]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(
      Words{"sh", "-c", "exec \"$0\" \"$@\" >&-", ddp(), "--devices", cpus(2)} + kFewSteps);
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring("stdout: Bad file descriptor"));
  CHECK(jobs.processes() == Words{});
}

TEST_CASE("A lab's closed stdout is an error, too", "[faults][ddp]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(
      {"sh", "-c", "exec \"$0\" \"$@\" >&-", build_dir() + "/04-ddp/labs", "summed-gradients"});
  INFO(story(run));
  CHECK(run.status != 0);
  CHECK_THAT(run.err, ContainsSubstring("what was printed is lost"));
  CHECK(jobs.processes() == Words{});
}

TEST_CASE("An error that nobody can read has its exit status all the same", "[faults][ddp]") {
  const Jobs jobs;
  for (const std::string closed : {">&- 2>&-", "2>/dev/full", "<&- >&- 2>&-"}) {
    INFO(closed);
    const ProcessResult run = jobs.run_words(
        {"sh", "-c", "exec \"$0\" \"$@\" " + closed, ddp(), "--devices", cpus(2), "--lr", "none"});
    CHECK(run.status == 1);
  }
}

TEST_CASE("A proposed command can be pasted as it stands", "[faults][ddp]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(Words{
      "env", "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_RANK=0",
      "OMPI_COMM_WORLD_LOCAL_SIZE=2", ddp(), "--data", "two words", "--save", "it's"});
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring("--data 'two words' --save 'it'\\''s'"));
}

/// One line in all, from a rank or from the launcher, and nothing left.
void check_said_once(const Jobs& jobs, const Words& command, const std::string& line,
                     int status = 1) {
  const ProcessResult run = jobs.run_words(command);
  INFO(story(run));
  CHECK(run.status == status);
  CHECK_THAT(run.err, StartsWith("error: " + line));
  CHECK(std::ranges::count(run.err, '\n') == 1);
  CHECK(jobs.processes() == Words{});
}

TEST_CASE("What all ranks find, or one of them, is said once", "[faults][ddp]") {
  const Jobs jobs;
  const std::string nowhere = jobs / "nowhere";
  const std::string syncbn = stage_binary("05-syncbn-checkpoint");
  const Words three = {jobs.launcher(), "--nproc-per-node", "3"};
  write_file(jobs / "short", std::string("short"));
  for (const Words& start : {Words{}, three}) {
    for (const std::string& stage : {ddp(), syncbn}) {
      INFO(stage << " " << start.size());
      const Words bare = start + Words{stage};
      check_said_once(jobs, bare + Words{"--data", "nothing"},
                      "--data: unknown data set 'nothing'");
      check_said_once(jobs, bare + Words{"--data-dir", nowhere}, "fashion-mnist: no file");
      check_said_once(jobs, bare + Words{"--epochs", "x"}, "--epochs: 'x'");
      check_said_once(jobs, bare + Words{"--backend", "x"}, "--backend: Invalid backend: 'x'");
      const Words ranks = bare + Words{"--data", "synthetic:120:10"};
      check_said_once(jobs, ranks + Words{"--load", nowhere}, "cannot open " + nowhere);
      check_said_once(jobs, ranks + Words{"--load", jobs / "short"},
                      std::string(jobs / "short") + ": found 5 bytes");
      check_said_once(jobs, ranks + Words{"--batch-size", "1"}, "global batch: 1 samples");
      check_said_once(jobs, ranks + Words{"--pad", "--order", "sampler", "--batch-size", "7"},
                      "--pad: equal parts");
      check_said_once(jobs, ranks + Words{"--drop-last", "--batch-size", "121"}, "120 training");
      check_said_once(jobs, ranks + Words{"--backend", "nccl"}, "--backend nccl serves GPUs");
    }
  }
  check_said_once(jobs, Words{syncbn, "--resume", nowhere} + kFewSteps, "cannot open " + nowhere);
  check_said_once(jobs, Words{syncbn, "--checkpoint-dir", "/proc/no"} + kFewSteps,
                  "cannot make the directory /proc/no");
  for (const std::string output : {"--save", "--metrics", "--trace"}) {
    check_said_once(jobs, Words{ddp(), output, "/proc/no"} + kFewSteps, "cannot save /proc/no");
  }
  check_said_once(jobs, three + Words{stage_binary("01-single-gpu")},
                  "01-single-gpu is one process");
  check_said_once(jobs, three + Words{testing::build_dir() + "/04-ddp/message-sizes", "--bogus"},
                  "The following argument was not expected: --bogus");
  // One rank alone: it says which it is.
  const std::string script =
      "test $RANK = 1 && set -- \"$@\" --data-dir \"$DIR/nowhere\"; exec \"$@\"";
  check_said_once(jobs, three + Words{"sh", "-c", script, "sh", ddp()},
                  "rank 1: fashion-mnist: no");
  check_said_once(
      jobs, three + Words{"sh", "-c", "exec \"$@\" --data synthetic --lr 0.$RANK", "sh", ddp()},
      "lr: rank 0 has 0.0, rank 1 has 0.1");
}

TEST_CASE("What a rank says of itself alone is still told with its rank", "[faults][ddp]") {
  // A descriptor that has the number of the launcher's line but is something else is left alone.
  const Jobs jobs;
  const std::string script =
      "exec 9>\"$DIR/mine\"; LOCKSTEP_LAUNCHER_PIPE=9:1 exec \"$@\" --data nothing";
  const ProcessResult run =
      jobs.run_words({jobs.launcher(), "--nproc-per-node", "2", "sh", "-c", script, "sh", ddp()});
  INFO(story(run));
  CHECK_THAT(run.err, ContainsSubstring("exited with status 1; the other ranks were stopped"));
  CHECK(jobs.text("mine").empty());
}

TEST_CASE("A local rank needs a device of its own", "[faults][ddp][row66]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(
      Words{jobs.launcher(), "--nproc-per-node", "3", ddp(), "--devices", "cpu:0,cpu:1"} +
      kFewSteps);
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring(
                          "error: rank 2 has local rank 2 on its host, but --devices names 2"));
}

TEST_CASE("Options that cannot be meant are refused by every rank, or before there are any",
          "[faults][ddp][row59]") {
  const Jobs jobs;
  for (const auto& [options, text] : std::vector<std::pair<Words, std::string>>{
           {{"--ddp", "magic"}, "--ddp: found magic, expected bucketed or manual"},
           {{"--all-reduce", "magic"}, "magic"},
           {{"--bucket-mb", "-3"}, "--bucket-mb"},
           {{"--ddp", "manual", "--no-overlap"}, "--no-overlap"},
           {{"--pad", "--baseline"}, "--pad"},
           {{"--clip-norm", "1", "--baseline"}, "--clip-norm"},
           {{"--accumulate", "2", "--model", "seed-bn", "--baseline"}, "--accumulate"},
           {{"--accumulate", "0"}, "--accumulate"},
           {{"--rank", "-2"}, "--rank"},
           {{"--backend", "magic"}, "magic"},
           {{"--init-method", "magic://"}, "magic"},
           {{"--batch-size", "1"}, "1 samples for 2 ranks"}}) {
    INFO(fmt::format("{}", fmt::join(options, " ")));
    const ProcessResult run =
        jobs.run_words(Words{ddp(), "--devices", cpus(2), "--data", "synthetic:120:10"} + options);
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring(text));
    CHECK_THAT(run.out, !ContainsSubstring("Baseline"));  // at once
  }
  const ProcessResult in_rank = jobs.run_words(
      Words{jobs.launcher(), "--nproc-per-node", "2", ddp(), "--baseline"} + kFewSteps);
  CHECK(in_rank.status == 1);
  CHECK_THAT(in_rank.err, ContainsSubstring("--baseline"));
}

TEST_CASE("--baseline shows a speed-up of stage 04", "[faults][ddp][verdict]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(
      Words{ddp(), "--devices", cpus(2), "--baseline", "--metrics", jobs / "metrics"} + kFewSteps);
  INFO(story(run));
  CHECK(run.status == 0);
  CHECK_THAT(run.out, ContainsSubstring("speed-up"));
  CHECK(read_json(jobs / "metrics").at("devices").size() == 2);
  CHECK(read_json(jobs / "metrics").contains("speedup"));
}

// --- Labs ----------------------------------------------------------------------------------------

ProcessResult lab(const Jobs& jobs, const Words& words) {
  const ProcessResult run = jobs.run_words(Words{build_dir() + "/04-ddp/labs"} + words);
  UNSCOPED_INFO(story(run));
  CHECK_FALSE(run.timed_out);
  CHECK(jobs.processes() == Words{});
  return run;
}

TEST_CASE("Lab: without set_epoch every epoch has the same order", "[faults][ddp][lab][row94]") {
  const Jobs jobs;
  const ProcessResult wrong = lab(jobs, {"forgotten-set-epoch"});
  CHECK(wrong.status == 0);
  CHECK_THAT(wrong.err, ContainsSubstring("comes a second time; call set_epoch()"));
  const auto order = [](const ProcessResult& run, const std::string& head) {
    const size_t at = run.out.find(head) + head.size();
    return run.out.substr(at, run.out.find('\n', at) - at);
  };
  CHECK(order(wrong, "rank 0, epoch 0: ") == order(wrong, "rank 0, epoch 1: "));
  const ProcessResult right = lab(jobs, {"forgotten-set-epoch", "--fixed"});
  CHECK(right.err.empty());
  CHECK(order(right, "rank 0, epoch 0: ") != order(right, "rank 0, epoch 1: "));
}

TEST_CASE("Lab: summed gradients are W times as long", "[faults][ddp][lab]") {
  const Jobs jobs;
  CHECK_THAT(lab(jobs, {"summed-gradients"}).out, ContainsSubstring("2.000 times as long"));
  CHECK_THAT(lab(jobs, {"summed-gradients", "--fixed"}).out,
             ContainsSubstring("1.000 times as long"));
}

TEST_CASE("Lab: uneven batches end in an error, are detected, or joined",
          "[faults][ddp][lab][row86]") {
  const Jobs jobs;
  const ProcessResult unnoticed = lab(jobs, {"uneven-batches", "--timeout", "1"});
  CHECK(unnoticed.status == 2);
  CHECK_THAT(unnoticed.err, ContainsSubstring("all_reduce of"));
  const ProcessResult detected = lab(jobs, {"uneven-batches-detected"});
  CHECK(detected.status == 1);
  const std::string text = "error: batches of this epoch: rank 0 has 5, rank 1 has 3; ";
  CHECK(detected.err.find(text) != detected.err.rfind(text));  // on both ranks
  CHECK_THAT(detected.out, !ContainsSubstring("step 0"));
  const ProcessResult joined = lab(jobs, {"uneven-batches", "--fixed"});
  CHECK(joined.status == 0);
  CHECK_THAT(joined.out, ContainsSubstring("step 4: 16 samples"));
  const size_t first = joined.out.find("|w| = "), last = joined.out.rfind("|w| = ");
  CHECK(first != last);
  CHECK(joined.out.substr(first, 14) == joined.out.substr(last, 14));
}

TEST_CASE("Lab: a collective of one rank alone is named by all", "[faults][ddp][lab][row72]") {
  const Jobs jobs;
  const ProcessResult wrong = lab(jobs, {"rank-conditional-collective", "--timeout", "1"});
  CHECK(wrong.status == 2);
  CHECK_THAT(wrong.err, ContainsSubstring("collective 1 (barrier)"));
  CHECK_THAT(wrong.out, !ContainsSubstring("all ranks went on"));
  CHECK_THAT(lab(jobs, {"rank-conditional-collective", "--fixed"}).out,
             ContainsSubstring("all ranks went on"));
}

}  // namespace
}  // namespace lockstep
