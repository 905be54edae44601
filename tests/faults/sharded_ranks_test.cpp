// Stage 06 with ranks that die, stand still, or differ: as stage 04 with them.

#include <signal.h>

#include <array>

#include "tests/support/catch.h"
#include "tests/support/jobs.h"
#include "tests/support/machine.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

const Words kSharded{stage_binary("06-fully-sharded"), "--model", "seed", "--workers", "0"};

/// Starts three ranks that train forever.
std::future<ProcessResult> begin_sharded(const Jobs& jobs, const std::string& way,
                                         const Words& options) {
  return jobs.begin({"--nproc-per-node", "3", "--redirect", jobs / "out"},
                    kSharded +
                        Words{"--shard", way, "--data", "synthetic:256:10", "--epochs", "100000",
                              "--log-interval", "1", "--lr", "0.0001", "--batch-size", "12"} +
                        options);
}

bool has_begun(const Jobs& jobs) {
  return soon(kSoon, [&] {
    return std::filesystem::exists(jobs / "out" / "rank_0.out") &&
           jobs.text("out/rank_0.out").find("Train Epoch: 1 [12/256") != std::string::npos;
  });
}

TEST_CASE("A rank that keeps a shard and is killed is named, and all is over within a second",
          "[faults][sharded]") {
  for (const std::string way : {"optimizer", "parameters"}) {
    INFO(way);
    const Jobs jobs;
    auto running = begin_sharded(jobs, way, {});
    const std::vector<pid_t> ranks = jobs.ranks(3, "06-fully-sharded");
    REQUIRE(ranks.size() == 3);
    REQUIRE(has_begun(jobs));
    REQUIRE(::kill(ranks[1], SIGKILL) == 0);
    const auto begin = Clock::now();
    const ProcessResult run = running.get();
    INFO(story(run));
    CHECK(seconds_since(begin) < promised(1));
    CHECK(run.status == 128 + SIGKILL);
    CHECK_THAT(run.err, ContainsSubstring("error: rank 1 (pid "));
    CHECK(jobs.processes() == Words{});
  }
}

// Whichever that is: a gather, a reduction, or what an evaluation begins with.
TEST_CASE("A rank of sharded training that stands still is named with the collective it misses",
          "[faults][sharded]") {
  const Jobs jobs;
  auto running = begin_sharded(jobs, "parameters", {"--timeout", "2"});
  const std::vector<pid_t> ranks = jobs.ranks(3, "06-fully-sharded");
  REQUIRE(ranks.size() == 3);
  REQUIRE(has_begun(jobs));
  REQUIRE(::kill(ranks[2], SIGSTOP) == 0);
  const auto begin = Clock::now();
  const ProcessResult run = running.get();
  INFO(story(run));
  CHECK(seconds_since(begin) < 2 + promised(4));
  CHECK(run.status != 0);
  const std::string told = jobs.text("out/rank_0.err") + jobs.text("out/rank_1.err");
  CHECK_THAT(told, ContainsSubstring("collective ") && ContainsSubstring("rank 2"));
  CHECK(jobs.processes() == Words{});
}

TEST_CASE("A loss that is not finite stops all ranks that share anything out in the same step",
          "[faults][sharded]") {
  for (const std::string way : {"none", "optimizer", "gradients", "parameters"}) {
    INFO(way);
    const Jobs jobs;
    const ProcessResult run =
        jobs.run_words(Words{jobs.launcher(), "--nproc-per-node", "2"} + kSharded +
                       Words{"--shard", way, "--data", "synthetic:120:10", "--lr", "1e12", "--save",
                             jobs / "weights"});
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring("step 1, rank 0 (cpu:0), rank 1 (cpu:1): the loss"));
    CHECK(std::ranges::count(run.err, '\n') == 1);
    CHECK(jobs.names() == Words{});
  }
}

TEST_CASE("Ranks that would share out differently are told so, once", "[faults][sharded]") {
  const Jobs jobs;
  for (const auto& [first, second, text] : std::vector<std::array<std::string, 3>>{
           {"--shard none", "--shard optimizer", "shard: rank 0 has \"none\", rank 1 has"},
           {"--unit layer", "--unit 2", "unit: rank 0 has \"layer\", rank 1 has \"2\""},
           {"--prefetch 0", "--prefetch 2", "prefetch: rank 0 has 0, rank 1 has 2"},
           {"--reshard-after-forward no", "", "reshard_after_forward: rank 0 has \"no\""},
           {"--optimizer adam", "--optimizer adamw", "optimizer: rank 0 has \"adam\""}}) {
    INFO(first << " and " << second);
    const std::string script =
        "[ $RANK = 0 ] && exec \"$0\" \"$@\" " + first + "; exec \"$0\" \"$@\" " + second;
    const ProcessResult run = jobs.run_words(
        Words{jobs.launcher(), "--nproc-per-node", "2", "sh", "-c", script} + kSharded);
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring(text));
    CHECK(std::ranges::count(run.err, '\n') == 1);
    CHECK(jobs.processes() == Words{});
  }
}

TEST_CASE("Options of sharding that have no meaning are refused in one line", "[faults][sharded]") {
  for (const auto& [options, text] : std::vector<std::pair<Words, std::string>>{
           {{"--shard", "all"},
            "--shard: 'all', expected none, optimizer, gradients or parameters"},
           {{"--unit", "0"}, "--unit: '0', expected layer, block, model, or MiB"},
           {{"--reshard-after-forward", "maybe"}, "'maybe', expected yes or no"},
           {{"--shard", "optimizer", "--prefetch", "2"}, "--prefetch: for --shard parameters"},
           {{"--prefetch", "-1"}, "--prefetch"},
           {{"--bucket-mb", "1"}, "--bucket-mb"}}) {
    const ProcessResult run = run_process(kSharded + options, kDeadline);
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring(text));
    CHECK(std::ranges::count(run.err, '\n') == 1);
  }
}

}  // namespace
}  // namespace lockstep
