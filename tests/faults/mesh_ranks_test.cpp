// Stage 07 with meshes that do not fit, ranks that differ, and ranks that die.

#include <signal.h>

#include <algorithm>
#include <tuple>

#include "tests/support/catch.h"
#include "tests/support/free_port.h"
#include "tests/support/jobs.h"
#include "tests/support/machine.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using Catch::Matchers::Matches;
using Catch::Matchers::StartsWith;

const Words kOnMesh{stage_binary("07-mesh"), "--data", "synthetic:120:10", "--workers", "0"};

TEST_CASE("A mesh that cannot be is refused in one line", "[faults][mesh]") {
  for (const auto& [options, text] : std::vector<std::pair<Words, std::string>>{
           {{"--mesh", "data=2,tensor=2"},
            "--mesh data=2,tensor=2: has 4 ranks, expected 2, as many as there are"},
           {{"--mesh", "rows=2"}, "--mesh: found 'rows=2', expected axes with their numbers"},
           {{"--mesh", "data"}, "--mesh: found 'data', expected axes"},
           {{"--mesh", "data=0"}, "--mesh: found 'data=0', expected axes"},
           {{"--mesh", "data=2,"}, "--mesh: found '', expected axes"},
           {{"--mesh", "data=2x"}, "--mesh: found 'data=2x', expected axes"},
           {{"--mesh", "data=1,data=2"}, "--mesh: found the axis data twice, expected once"},
           {{"--mesh", "data=1048577"},
            "--mesh: found 1 x 1048577 ranks up to data=1048577, expected 1048576 at most"},
           {{"--mesh", "data=1024,shard=1024,tensor=2"},
            "--mesh: found 1048576 x 2 ranks up to tensor=2, expected 1048576 at most"},
           {{"--mesh", "data=4294967296,shard=4294967296"},  // 2^64: no number for it
            "--mesh: found 1 x 4294967296 ranks up to data=4294967296, expected 1048576 at most"},
           {{"--mesh", "data=65536,shard=65536,tensor=65536,pipeline=65536"},  // the same
            "--mesh: found 65536 x 65536 ranks up to shard=65536, expected 1048576 at most"},
           {{"--mesh", "data=9223372036854775808"},
            "--mesh: found 'data=9223372036854775808', expected axes"},
           {{"--sync-bn-group", "1", "--model", "seed-bn"}, "--sync-bn-group: in a mesh"},
           {{"--mesh", "tensor=3", "--devices", cpus(3)},
            "--mesh tensor=3: along tensor: no layer of this network divides by 3 ranks "
            "(fc1 has 256, fc2 has 256, fc3 has 256, fc4 has 256); use a number that divides one "
            "of them"}}) {
    Words words = kOnMesh + options;
    if (std::ranges::count(options, "--devices") == 0) words = words + Words{"--devices", cpus(2)};
    const ProcessResult run = run_process(words, kDeadline);
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring(text));
    CHECK(std::ranges::count(run.err, '\n') == 1);
    CHECK(run.out.find("Train Epoch") == std::string::npos);
  }
}

TEST_CASE("An option of an axis that the mesh has not is refused, not ignored", "[faults][mesh]") {
  const auto run = [](const Words& options) {
    return run_process(kOnMesh + Words{"--devices", cpus(2), "--max-steps", "1"} + options,
                       kDeadline);
  };
  for (const auto& [mesh, options, text] : std::vector<std::tuple<std::string, Words, std::string>>{
           {"auto", {"--schedule", "1f1b"}, "--mesh pipeline=2"},
           {"data=2", {"--shard", "gradients"}, "--mesh shard=2"},
           {"shard=1,data=2", {"--shard", "parameters"}, "--mesh shard=2"},
           {"tensor=2", {"--prefetch", "2"}, "--mesh shard=2"},
           {"data=2", {"--reshard-after-forward", "no"}, "--mesh shard=2"},
           {"tensor=2", {"--unit", "model"}, "--mesh shard=2"},
           {"pipeline=2", {"--unit", "0.5"}, "--mesh shard=2"}}) {
    const ProcessResult refused = run(options + Words{"--mesh", mesh});
    INFO(story(refused));
    CHECK(refused.status == 1);
    CHECK_THAT(refused.err, StartsWith("error: " + options[0] + ": ") &&
                                ContainsSubstring("and --mesh " + mesh +
                                                  " has none; leave it out, "
                                                  "or give " +
                                                  text + "\n"));
    CHECK(std::ranges::count(refused.err, '\n') == 1);
    CHECK(refused.out.find("Train Epoch") == std::string::npos);
  }
  const ProcessResult rounded = run({"--mesh", "shard=2", "--reduce-dtype", "bf16"});
  CHECK(rounded.status == 1);
  CHECK_THAT(rounded.err,
             StartsWith("error: --reduce-dtype bf16: on a mesh parameters and gradients"));
  // Two hosts with a rank each: the default mesh, which is data=2, is known when they have met.
  const ProcessResult late =
      run_process(Words{stage_binary("07-mesh"), "--data", "synthetic:120:10", "--devices", "sim:1",
                        "--nodes", "2", "--shard", "optimizer"},
                  kDeadline);
  INFO(story(late));
  CHECK(late.status == 1);
  CHECK(late.err ==
        "error: --shard: says what ranks along shard share out, and --mesh data=2,shard=1 has "
        "none; leave it out, or give --mesh shard=2\n");
  for (const Words& options : {Words{"--mesh", "data=2", "--unit", "model"},
                               {"--mesh", "shard=2", "--shard", "gradients", "--unit", "0.5"},
                               {"--prefetch", "2"}}) {
    const ProcessResult taken = run(options);
    INFO(story(taken));
    CHECK(taken.status == 0);
  }
}

/// Of 64 samples two ranks cut 11, 11 and 10 each, and one rank 22, 21 and 21.
TEST_CASE("--baseline of a mesh normalises the micro-batches that its ranks have",
          "[faults][mesh][verdict]") {
  for (const Words& mesh : {Words{"data=2,pipeline=2"},
                            {"shard=2,tensor=2"},
                            {"tensor=2,pipeline=2", "--no-sync-bn"}}) {
    const ProcessResult run =
        run_process(kOnMesh +
                        Words{"--baseline", "--devices", cpus(4), "--model", "seed-bn",
                              "--accumulate", "3", "--max-steps", "2", "--mesh"} +
                        mesh,
                    kDeadline);
    INFO(story(run));
    CHECK(run.status == 0);
    CHECK_THAT(run.out, ContainsSubstring("they agree"));
  }
  // There the ranks of a pipeline are as one rank; these two normalise by themselves.
  const ProcessResult refused = run_process(
      kOnMesh + Words{"--baseline", "--devices", cpus(4), "--model", "seed-bn", "--accumulate", "3",
                      "--mesh", "data=2,pipeline=2", "--no-sync-bn"},
      kDeadline);
  INFO(story(refused));
  CHECK(refused.status == 1);
  CHECK_THAT(refused.err,
             ContainsSubstring("--accumulate: batch normalisation sees each of the 3"));
  CHECK(std::ranges::count(refused.err, '\n') == 1);
}

TEST_CASE("Ranks with other meshes are told so, once", "[faults][mesh]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(
      Words{
          jobs.launcher(), "--nproc-per-node", "2", "sh", "-c",
          "[ $RANK = 0 ] && exec \"$0\" \"$@\" --mesh data=2; exec \"$0\" \"$@\" --mesh shard=2"} +
      kOnMesh);
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring("mesh: rank 0 has \"data=2\", rank 1 has \"shard=2\""));
  CHECK(std::ranges::count(run.err, '\n') == 1);
  CHECK(jobs.processes() == Words{});
}

TEST_CASE("A loss that is not finite stops all ranks of a mesh in the same step",
          "[faults][mesh]") {
  for (const std::string mesh : {"data=2,tensor=2", "shard=2,tensor=2", "data=2,shard=2"}) {
    INFO(mesh);
    const Jobs jobs;
    const ProcessResult run = jobs.run_words(
        Words{jobs.launcher(), "--nproc-per-node", "4"} + kOnMesh +
        Words{"--mesh", mesh, "--optimizer", "sgd", "--lr", "1e12", "--save", jobs / "weights"});
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring("step 1, rank 0 (cpu:0, "));
    CHECK_THAT(run.err, ContainsSubstring("is not finite"));
    CHECK(std::ranges::count(run.err, '\n') == 1);
    CHECK(jobs.names() == Words{});
  }
}

TEST_CASE("A rank of a mesh that is killed is named with its coordinates", "[faults][mesh]") {
  const Jobs jobs;
  auto running =
      jobs.begin({"--nproc-per-node", "4", "--redirect", jobs / "out"},
                 kOnMesh + Words{"--model", "seed", "--mesh", "data=2,tensor=2", "--epochs",
                                 "100000", "--log-interval", "1", "--lr", "0.0001"});
  const std::vector<pid_t> ranks = jobs.ranks(4, "07-mesh");
  REQUIRE(ranks.size() == 4);
  REQUIRE(jobs.soon_says("out/rank_0.out", "Train Epoch: 1 [64/120"));
  REQUIRE(::kill(ranks[3], SIGKILL) == 0);
  const ProcessResult run = running.get();
  INFO(story(run));
  CHECK(run.status == 128 + SIGKILL);
  CHECK_THAT(run.err,
             ContainsSubstring("rank 3 (data 1, tensor 1) was killed by signal 9 (SIGKILL)"));
  const std::string last = fmt::format(
      "error: rank 3 (data 1, tensor 1; pid {}) was killed by "
      "signal 9 (SIGKILL); the other ranks were stopped\n",
      ranks[3]);
  CHECK_THAT(run.err, EndsWith(last));
  CHECK(jobs.processes() == Words{});
}

/// The kernel's reason, if this rank was writing, or the dead one had not read all: "Broken pipe".
const std::string kReason = "( \\([A-Z][a-z ]+\\))?";

/// Starts ranks as mpirun or srun do, and kills one in training: nobody tells of the dead one but
/// the other ranks, into err.0, err.1, ... of the folder.
void kill_a_rank_of(int ranks, int victim, const Words& options, const TempDir& folder) {
  const std::string script = fmt::format(
      "cd '{}'; for r in $(seq 0 {}); do RANK=$r WORLD_SIZE={} LOCAL_RANK=$r "
      "MASTER_ADDR=127.0.0.1 MASTER_PORT={} \"$@\" >out.$r 2>err.$r & "
      "[ $r = {} ] && victim=$!; done; "
      "until grep -q 'Train Epoch: 1 .64/120' out.0; do sleep 0.1; done; kill -9 $victim; wait",
      folder.path().string(), ranks - 1, ranks, free_port(), victim);
  const ProcessResult run =
      run_process(Words{"sh", "-c", script, "sh"} + kOnMesh +
                      Words{"--model", "seed", "--devices", cpus(ranks), "--epochs", "100000",
                            "--log-interval", "1", "--lr", "0.0001"} +
                      options,
                  kDeadline);
  REQUIRE_FALSE(run.timed_out);
}

TEST_CASE("Ranks without our launcher name a dead one with its coordinates", "[faults][mesh]") {
  const TempDir folder;
  kill_a_rank_of(4, 3, {"--mesh", "data=2,tensor=2"}, folder);
  std::string all;
  for (const std::string me :
       {"0 (data 0, tensor 0)", "1 (data 0, tensor 1)", "2 (data 1, tensor 0)"}) {
    const std::string error = read_text(folder / ("err." + me.substr(0, 1)));
    INFO(error);
    CHECK_THAT(error, StartsWith("error: rank " + me));
    // Rank 0 with its store may have ended before this rank could ask for the others' errors.
    CHECK_THAT(error, Matches(".*: rank [0-3] \\(data [01], tensor [01]\\) closed the "
                              "connection" +
                              kReason + "(; the store of rank 0 \\(data 0, tensor 0\\) .*)?\n"));
    CHECK(std::ranges::count(error, '\n') == 1);
    all += error;
  }
  // A rank that waits for another may hear of that one's end first.
  CHECK_THAT(all, ContainsSubstring("rank 3 (data 1, tensor 1) closed the connection"));
}

TEST_CASE("A rank of a mesh that does not come is named with its coordinates", "[faults][mesh]") {
  const TempDir folder;
  const std::string script = fmt::format(
      "cd '{}'; for r in 0 1 3; do RANK=$r WORLD_SIZE=4 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 "
      "MASTER_PORT={} \"$@\" >out.$r 2>err.$r & done; wait",
      folder.path().string(), free_port());
  const ProcessResult run =
      run_process(Words{"sh", "-c", script, "sh"} + kOnMesh +
                      Words{"--devices", cpus(4), "--mesh", "data=2,tensor=2", "--timeout", "3"},
                  kDeadline);
  REQUIRE_FALSE(run.timed_out);
  for (const std::string rank : {"0", "1", "3"}) {
    const std::string error = read_text(folder / ("err." + rank));
    INFO(error);
    CHECK_THAT(error, StartsWith("error: missing ranks: 2 (data 1, tensor 0) (of 4): they did "));
    CHECK(std::ranges::count(error, '\n') == 1);
  }
}

/// Rank 0 has the store, so the others know only what their connections say.
TEST_CASE("Where rank 0 has died, the others name ranks with their coordinates", "[faults][mesh]") {
  for (const std::string backend : {"shm", "tcp"}) {
    INFO(backend);
    const TempDir folder;
    kill_a_rank_of(3, 0, {"--mesh", "data=3", "--backend", backend}, folder);
    for (const std::string rank : {"1", "2"}) {
      const std::string error = read_text(folder / ("err." + rank));
      INFO(error);
      CHECK_THAT(error, StartsWith(fmt::format("error: rank {0} (data {0}): ", rank)));
      CHECK_THAT(error, Matches(".*: rank [0-2] \\(data [0-2]\\) closed the connection" + kReason +
                                "; the store of rank 0 \\(data 0\\) .*\n"));
    }
  }
}

TEST_CASE("A mesh goes on with each parameter's own count of steps, and logs on from there",
          "[faults][mesh][checkpoint]") {
  check_goes_on(Jobs(), kOnMesh + Words{"--devices", cpus(4), "--mesh", "shard=2,tensor=2"});
}

/// With --no-sync-bn a rank's part of a batch is normalised by itself.
TEST_CASE("A mesh that divides batches otherwise resumes only where that is allowed",
          "[faults][mesh][checkpoint][row119]") {
  const Jobs jobs;
  const auto run = [&](const std::string& mesh, const Words& more) {
    return run_process(
        kOnMesh +
            Words{"--devices", cpus(4), "--model", "seed-bn", "--no-sync-bn", "--mesh", mesh,
                  "--checkpoint-dir", jobs / "saved", "--resume", "auto"} +
            more,
        kDeadline);
  };
  const Words one{"--max-steps", "1"}, two{"--max-steps", "2"};
  REQUIRE(run("data=2,tensor=2", one).status == 0);
  const ProcessResult refused = run("data=4", two);
  INFO(story(refused));
  CHECK(refused.status == 1);
  CHECK_THAT(refused.err, ContainsSubstring(
                              "was saved by 4 ranks, this run has 4 in a mesh that divides a batch "
                              "by 4, not 2; give the --mesh that it was saved with, or allow the"));
  CHECK(std::ranges::count(refused.err, '\n') == 1);
  const ProcessResult allowed = run("data=4", two + Words{"--allow-world-size-change"});
  INFO(story(allowed));
  CHECK(allowed.status == 0);
  CHECK_THAT(allowed.err, ContainsSubstring("the part of a batch that is normalised together"));
  const ProcessResult alike = run("shard=2,data=2", Words{"--max-steps", "3"});
  INFO(story(alike));
  CHECK(alike.status == 0);  // parts as before
  CHECK_THAT(alike.err, !ContainsSubstring("was saved by"));
}

}  // namespace
}  // namespace lockstep
