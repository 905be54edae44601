// Stage 04 over shared memory: what remains when everybody is killed, and hosts mistaken for one.

#include <signal.h>

#include <random>

#include "tests/support/catch.h"
#include "tests/support/jobs.h"
#include "tests/support/machine.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

std::string ddp() { return stage_binary("04-ddp"); }

const Words kFewSteps{"--data", "synthetic:120:10", "--batch-size", "12", "--workers", "0"};

TEST_CASE("Two ranks of one host use shared memory, and say so", "[faults][ddp]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(Words{ddp(), "--devices", cpus(2)} + kFewSteps);
  INFO(story(run));
  CHECK(run.status == 0);
  CHECK_THAT(run.out, ContainsSubstring("2 ranks over shm (one host): global batch"));
}

/// All that a user sees of shared memory that has a name.
Words names_in_dev_shm() {
  Words names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    names.push_back(entry.path());
  }
  std::ranges::sort(names);
  return names;
}

TEST_CASE("Runs of which everything is killed leave no process and nothing in /dev/shm",
          "[faults][ddp]") {
  const Words before = names_in_dev_shm();
  std::mt19937 random(21);
  for (int turn = 0; turn < (full_campaign() ? 200 : 10); ++turn) {
    const Jobs jobs;
    auto running = jobs.begin(
        {"--nproc-per-node", "2", "--redirect", jobs / "out"},
        {ddp(), "--backend", "shm", "--data", "synthetic:240:10", "--epochs", "100000",
         "--log-interval", "1", "--lr", "0.0001", "--batch-size", "12", "--workers", "0"});
    // Half of them die while they start.
    if (turn % 2 == 0) REQUIRE(jobs.soon_says("out/rank_0.out", "Train Epoch: 1 [12/240"));
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 200));
    // The launcher among them, so that nobody can tidy up but those that die.
    for (const std::string& process : jobs.processes()) ::kill(std::stoi(process), SIGKILL);
    running.get();
    INFO("turn " << turn);
    REQUIRE(soon(kDeadline, [&] { return jobs.processes().empty(); }));
    REQUIRE(names_in_dev_shm() == before);
  }
}

TEST_CASE("Few open files end no run in waiting, and are named", "[faults][ddp]") {
  const Jobs jobs;
  int refused = 0;
  for (int files = 10; files <= 16; ++files) {
    const std::string limit = fmt::format("ulimit -n {}; exec \"$@\"", files);
    const ProcessResult run =
        jobs.run_words(Words{"sh", "-c", limit, "sh", ddp(), "--timeout", "1000"} + kFewSteps);
    INFO(files << " files: " << story(run));
    CHECK_FALSE(run.timed_out);
    if (run.status == 0) continue;
    ++refused;
    // "Too many open files", or the limit; a rank whose peer has none left to answer it names both.
    CHECK_THAT(run.err, ContainsSubstring("pen files") || ContainsSubstring("ulimit -n"));
  }
  CHECK(refused > 0);
}

TEST_CASE("Two hosts of one name use TCP, and say why", "[faults][ddp][twohosts]") {
  const Jobs jobs;
  const Words two_hosts{"env", "LOCKSTEP_LAUNCHER=" + jobs.launcher(),
                        LOCKSTEP_SOURCE "/tools/two-hosts"};
  const ProcessResult permitted = jobs.run_words(two_hosts + Words{"true"});
  if (permitted.status == 77) LOCKSTEP_SKIP("namespaces not permitted");
  REQUIRE(permitted.status == 0);
  const ProcessResult run = jobs.run_words(two_hosts + Words{ddp()} + kFewSteps);
  INFO(story(run));
  CHECK(run.status == 0);
  CHECK_THAT(run.out, ContainsSubstring("2 ranks over tcp (no shared memory: rank 1: cannot reach "
                                        "rank 0's Unix socket: Connection refused), no job key: "
                                        "trusts its network: global batch"));
  const ProcessResult asked =
      jobs.run_words(two_hosts + Words{ddp(), "--backend", "shm"} + kFewSteps);
  INFO(story(asked));
  CHECK(asked.status == 1);
  CHECK_THAT(asked.err,
             ContainsSubstring("--backend shm: rank 1: cannot reach rank 0's Unix socket: "
                               "Connection refused; leave it out, or give --backend tcp"));
  CHECK(jobs.processes() == Words{});
}

}  // namespace
}  // namespace lockstep
