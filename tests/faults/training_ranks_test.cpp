// Ranks that train, of stages 03, 04 and 06: under real launchers, on two hosts, and when some die.

#include <fmt/ranges.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <random>
#include <regex>

#include "common/core/real.h"
#include "tests/support/catch.h"
#include "tests/support/free_port.h"
#include "tests/support/jobs.h"
#include "tests/support/json.h"
#include "tests/support/machine.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

const Words kStages{"04-ddp", "06-fully-sharded"};
const std::string kSplit = "03-model-split/tensor-split";  // ranks that share layers
const Words kAllStages = kStages + Words{kSplit};
const Words kShortRun{"--model", "seed", "--data",  "synthetic:120:10", "--batch-size", "12",
                      "--lr",    "0.01", "--order", "sampler",          "--workers",    "0"};

/// The bytes of the weights that a command leaves; its other files are in the same folder.
std::string weights_of(const Jobs& jobs, const Words& command, const std::string& name) {
  const ProcessResult run = jobs.run_words(command + kShortRun + Words{"--save", jobs / name});
  INFO(story(run));
  REQUIRE(run.status == 0);
  CHECK(jobs.processes() == Words{});
  return jobs.text(name);
}

/// Whether a stage that `start` starts leaves the same weights as one that starts its own ranks.
void check_weights(const Words& start, const std::string& stage) {
  static std::map<std::string, std::string> all_expected;  // by stage
  const Jobs jobs;
  const std::string program = stage_binary(stage);
  std::string& expected = all_expected[stage];
  if (expected.empty()) {
    expected = weights_of(jobs, {program, "--devices", cpus(2)}, "expected");
  }
  INFO(stage << ": " << fmt::format("{}", fmt::join(start, " ")));
  CHECK((weights_of(jobs, start + Words{program}, "found") == expected));
}

/// The first of these programs that PATH has; "" if it has none.
std::string in_path(const std::string& program) {
  std::istringstream folders(std::getenv("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (::access((folder + "/" + program).c_str(), X_OK) == 0) return folder + "/" + program;
  }
  return "";
}

std::string launcher() { return Jobs().launcher(); }

// --- Launchers -----------------------------------------------------------------------------------

TEST_CASE("Every launcher leads to the same weights", "[faults][ddp][sharded][tensorsplit]") {
  for (const std::string& stage : kAllStages) {
    check_weights({launcher(), "--nproc-per-node", "2"}, stage);
    // By hand, rank 0 in the background, the address as an option.
    const std::string script = fmt::format(
        "set -- \"$@\" --world-size 2 --local-rank 0 --init-method tcp://127.0.0.1:{}; "
        "\"$@\" --rank 0 & \"$@\" --rank 1 || exit 1; wait $! && test -s \"$DIR/found\"",
        free_port());
    check_weights({"sh", "-c", script, "sh"}, stage);
    // Without a launcher the program starts itself, whatever the name it was called by.
    check_weights({"bash", "-c", "exec -a renamed \"$@\" --devices " + cpus(2), "bash"}, stage);
  }
}

TEST_CASE("Under mpirun the weights are those of our launcher",
          "[faults][ddp][sharded][tensorsplit][mpirun]") {
  if (in_path("mpirun").empty()) LOCKSTEP_SKIP("no mpirun");
  const Words mpirun{"env",    "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                     "mpirun", "--oversubscribe",          "-np",
                     "2"};
  for (const std::string& stage : full_campaign() ? kAllStages : kStages) {
    check_weights(mpirun + Words{"-x", "MASTER_ADDR=127.0.0.1", "-x",
                                 fmt::format("MASTER_PORT={}", free_port())},
                  stage);
  }
  const ProcessResult unaddressed =
      Jobs().run_words(mpirun + Words{stage_binary("04-ddp")} + kShortRun);
  CHECK(unaddressed.status != 0);
  CHECK_THAT(unaddressed.err, ContainsSubstring("MASTER_ADDR"));
  CHECK_THAT(unaddressed.err, ContainsSubstring("mpirun"));
}

TEST_CASE("Under MPICH's mpiexec the weights are those of our launcher",
          "[faults][ddp][sharded][tensorsplit][mpirun]") {
  if (in_path("mpiexec.mpich").empty()) LOCKSTEP_SKIP("no mpiexec.mpich");
  const Words mpiexec{"mpiexec.mpich", "-n", "2"};
  for (const std::string& stage : full_campaign() ? kAllStages : kStages) {
    check_weights(mpiexec + Words{"-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT",
                                  fmt::format("{}", free_port())},
                  stage);
  }
  const ProcessResult unaddressed =
      Jobs().run_words(mpiexec + Words{stage_binary("04-ddp")} + kShortRun);
  CHECK(unaddressed.status != 0);
  CHECK_THAT(unaddressed.err,
             ContainsSubstring("MASTER_ADDR") &&
                 ContainsSubstring("mpiexec.hydra -n 2 -genv MASTER_ADDR 127.0.0.1"));
  CHECK_THAT(unaddressed.out, !ContainsSubstring("starting"));
  // One process is a bare start.
  check_weights({"sh", "-c", "exec mpiexec.mpich -n 1 \"$@\" --devices " + cpus(2), "sh"},
                "04-ddp");
}

TEST_CASE("Copies that a launcher starts which is not known refuse to be two whole jobs",
          "[faults][ddp]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(
      Words{"env", "FLUX_TASK_RANK=1", stage_binary("04-ddp"), "--save", jobs / "weights"});
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK(run.out.empty());
  CHECK_THAT(run.err, ContainsSubstring("FLUX_TASK_RANK=1: Flux started this process as one of"));
  CHECK_FALSE(jobs.has("weights"));
}

TEST_CASE("Under torchrun the weights are those of our launcher",
          "[faults][ddp][sharded][tensorsplit][torchrun]") {
  const char* named = std::getenv("LOCKSTEP_TORCHRUN");
  const std::string torchrun = named != nullptr ? named : in_path("torchrun");
  if (torchrun.empty()) LOCKSTEP_SKIP("no torch");
  for (const std::string& stage : full_campaign() ? kAllStages : kStages) {
    check_weights({torchrun, "--no-python", "--nproc-per-node", "2", "--master-port", "29519"},
                  stage);
  }
}

// --- Two hosts -----------------------------------------------------------------------------------

/// The command that starts a program's two ranks on two hosts; empty where that is not permitted.
Words two_hosts() {
  const Words command{"env", "LOCKSTEP_LAUNCHER=" + launcher(), LOCKSTEP_SOURCE "/tools/two-hosts"};
  const ProcessResult permitted = Jobs().run_words(command + Words{"true"});
  if (permitted.status == 77) return {};
  REQUIRE(permitted.status == 0);
  return command;
}

TEST_CASE("Two hosts lead to the weights of one", "[faults][ddp][sharded][tensorsplit][twohosts]") {
  const Words start = two_hosts();
  if (start.empty()) LOCKSTEP_SKIP("namespaces not permitted");
  for (const std::string& stage : kAllStages) check_weights(start, stage);
  check_weights(Words{"sh", "-c", "exec \"$@\" --backend tcp", "sh"} + start, "04-ddp");
  // The store at host 0.
  check_weights(Words{"sh", "-c", "exec \"$@\" --init-method tcp://10.77.0.1:29600", "sh"} + start,
                "04-ddp");
}

/// Bytes that two hosts sent each other, both ways together, while a stage made `steps` steps.
double bytes_on_the_cable(const Words& start, const Words& program, int steps) {
  const ProcessResult run =
      Jobs().run_words(start + program + Words{"--max-steps", std::to_string(steps)});
  INFO(story(run));
  REQUIRE(run.status == 0);
  std::smatch sent;
  const std::regex line("the cable carried (\\d+) bytes from node 0 and (\\d+) from node 1");
  REQUIRE(std::regex_search(run.err, sent, line));
  return std::stod(sent[1]) + std::stod(sent[2]);
}

/// The system's own counters of a network interface. Headers are counted, too.
TEST_CASE("A cable carries the bytes that the summary of stage 06 says",
          "[faults][sharded][twohosts]") {
  const Words start = two_hosts();
  if (start.empty()) LOCKSTEP_SKIP("namespaces not permitted");
  for (const auto& [way, halves] : std::vector<std::pair<std::string, int>>{
           {"none", 2}, {"optimizer", 2}, {"gradients", 2}, {"parameters", 3}}) {
    if (!full_campaign() && (way == "none" || way == "gradients")) continue;
    INFO(way);
    const Jobs jobs;
    const Words program{stage_binary("06-fully-sharded"),
                        "--data",
                        "synthetic:256:2",
                        "--batch-size",
                        "8",
                        "--workers",
                        "0",
                        "--shard",
                        way,
                        "--metrics",
                        jobs / "metrics"};
    const double few = bytes_on_the_cable(start, program, 2),
                 many = bytes_on_the_cable(start, program, 12);
    const double step = read_json(jobs / "metrics").at("bytes_per_step").at("sent").get<double>();
    const double parameters = 784 * 256 + 3 * 256 * 256 + 256 * 10 + 4 * 256 + 10;  // of the mlp
    CHECK(step == Approx(halves * parameters * sizeof(Real) / 2).epsilon(0.001));
    CHECK((many - few) / 10 == Approx(2 * step).epsilon(0.03));  // two ranks
  }
}

// --- Ranks that die ------------------------------------------------------------------------------

/// A network that three ranks can share: --layers auto finds nothing in the seed network.
Words network_of(const std::string& stage) {
  if (stage == kSplit) return {"--model", "resnet18", "--width", "3"};
  return {"--model", "seed"};
}

/// Starts three ranks of a stage that train forever. Their output goes to the folder "out".
std::future<ProcessResult> begin_training(const Jobs& jobs, const std::string& stage,
                                          const Words& launch_options, const Words& options = {}) {
  return jobs.begin(
      launch_options + Words{"--nproc-per-node", "3", "--redirect", jobs / "out"},
      Words{stage_binary(stage), "--data", "synthetic:256:10", "--epochs", "100000",
            "--log-interval", "1", "--lr", "0.0001", "--batch-size", "12", "--workers", "0"} +
          network_of(stage) + options);
}

/// Their processes.
std::vector<pid_t> ranks_of(const Jobs& jobs, const std::string& stage) {
  return jobs.ranks(3, stage.substr(stage.rfind('/') + 1));
}

/// Whether those ranks have soon made a step.
bool has_stepped(const Jobs& jobs, const std::string& file = "rank_0.out") {
  return jobs.soon_says("out/" + file, "Train Epoch: 1 [12/256");
}

TEST_CASE("A rank that is killed while it trains is named, and all is over within a second",
          "[faults][ddp][sharded][tensorsplit][row67][row125]") {
  std::mt19937 random(20);
  std::vector<double> taken;
  for (int turn = 0; turn < (full_campaign() ? 40 : 3); ++turn) {
    const std::string& stage = kAllStages[turn % 3];
    INFO(stage);
    const Jobs jobs;
    auto running = begin_training(jobs, stage, {});
    const std::vector<pid_t> ranks = ranks_of(jobs, stage);
    REQUIRE(ranks.size() == 3);
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 600));
    const size_t victim = random() % 3;
    REQUIRE(::kill(ranks[victim], SIGKILL) == 0);
    const auto begin = Clock::now();
    const ProcessResult run = running.get();
    INFO(story(run));
    taken.push_back(seconds_since(begin));
    CHECK(taken.back() < promised(1));
    CHECK(run.status == 128 + SIGKILL);
    CHECK_THAT(run.err,
               ContainsSubstring(fmt::format("error: rank {} (pid {}) was killed by signal 9",
                                             victim, ranks[victim])));
    CHECK(jobs.processes() == Words{});
  }
  check_promise(taken, 1);
}

TEST_CASE("After a kill the ranks train again within moments", "[faults][ddp][sharded]") {
  for (const std::string& stage : kStages) {
    INFO(stage);
    const Jobs jobs;
    auto running = begin_training(jobs, stage, {"--max-restarts", "1"});
    const std::vector<pid_t> ranks = ranks_of(jobs, stage);
    REQUIRE(ranks.size() == 3);
    REQUIRE(has_stepped(jobs));
    const auto begin = Clock::now();
    REQUIRE(::kill(ranks[1], SIGKILL) == 0);
    CHECK(has_stepped(jobs, "rank_0.restart_1.out"));
    CHECK(seconds_since(begin) < promised(1.5));
    const std::vector<pid_t> again = ranks_of(jobs, stage);
    REQUIRE(again.size() == 3);
    REQUIRE(::kill(again[2], SIGKILL) == 0);  // a table for every start
    const ProcessResult run = running.get();
    INFO(story(run));
    for (const int rank : {1, 2}) {
      CHECK_THAT(run.err, ContainsSubstring(
                              fmt::format("\n  rank {} was killed by signal 9 (SIGKILL), ", rank)));
    }
    CHECK_THAT(run.err, ContainsSubstring("the last call of each rank (3 of 3 ranks)"));
    CHECK(run.status == 128 + SIGKILL);
    CHECK(jobs.processes() == Words{});
  }
}

// Whichever that is: a reduction or a gather of a step, or what an evaluation begins with.
TEST_CASE("A rank that stands still is named with the collective that misses it",
          "[faults][ddp][sharded][tensorsplit][row68]") {
  for (const std::string& stage : kAllStages) {
    INFO(stage);
    const Jobs jobs;
    auto running = begin_training(jobs, stage, {}, {"--timeout", "2"});
    const std::vector<pid_t> ranks = ranks_of(jobs, stage);
    REQUIRE(ranks.size() == 3);
    REQUIRE(has_stepped(jobs));
    REQUIRE(::kill(ranks[2], SIGSTOP) == 0);
    const auto begin = Clock::now();
    const ProcessResult run = running.get();
    INFO(story(run));
    CHECK(seconds_since(begin) < 2 + promised(4));
    CHECK(run.status != 0);
    const std::string told = jobs.text("out/rank_0.err") + jobs.text("out/rank_1.err");
    // On a busy machine rank 0's store may miss the roll call. The launcher below knows even then.
    CHECK_THAT(told,
               ContainsSubstring("collective ") &&
                   (ContainsSubstring("rank 2") || ContainsSubstring("did not answer within")));
    // Not the ranks that gave it up.
    CHECK_THAT(run.err,
               ContainsSubstring(fmt::format("\nerror: rank 2 (pid {}) was stopped", ranks[2])) &&
                   !ContainsSubstring("error: rank 0") && !ContainsSubstring("error: rank 1"));
    CHECK_THAT(run.err, ContainsSubstring("\n  rank 2 was stopped by a signal (SIGSTOP or its "
                                          "kind), "));
    CHECK_THAT(run.err, ContainsSubstring("all_") && ContainsSubstring(" s "));
    CHECK(jobs.processes() == Words{});
  }
}

}  // namespace
}  // namespace lockstep
