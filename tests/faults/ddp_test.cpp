// Mistakes of those who start stage 04, and its labs.

#include <fmt/ranges.h>

#include <array>

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
    const std::string script =
        "[ $RANK = 0 ] && exec \"$0\" \"$@\" " + first + "; exec \"$0\" \"$@\" " + second;
    const bool of_data = first.starts_with("--data");
    const ProcessResult run =
        jobs.run_words(Words{jobs.launcher(), "--nproc-per-node", "2", "sh", "-c", script, ddp(),
                             "--workers", "0"} +
                       (of_data ? Words{} : Words{"--data", "synthetic:64:8"}));
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
      if (start.empty() != (stage == ddp()) && !full_campaign()) continue;
      INFO(stage << " " << start.size());
      const Words bare = start + Words{stage};
      check_said_once(jobs, bare + Words{"--data", "nothing"},
                      "--data: unknown data set 'nothing'");
      check_said_once(jobs, bare + Words{"--data-dir", nowhere}, "fashion-mnist: no file");
      check_said_once(jobs, bare + Words{"--epochs", "x"}, "--epochs: 'x'");
      check_said_once(jobs, bare + Words{"--backend", "x"}, "--backend: found 'x', expected auto");
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
                  "Not expected: --bogus");
  // One rank alone: it says which it is.
  const std::string script =
      "test $RANK = 1 && set -- \"$@\" --data-dir \"$DIR/nowhere\"; exec \"$@\"";
  check_said_once(jobs, three + Words{"sh", "-c", script, "sh", ddp()},
                  "rank 1: fashion-mnist: no");
  check_said_once(
      jobs, three + Words{"sh", "-c", "exec \"$@\" --data synthetic --lr 0.$RANK", "sh", ddp()},
      "lr: rank 0 has 0.0, rank 1 has 0.1");
}

TEST_CASE("A wrong LOCKSTEP_DEBUG, which all ranks find, is said once", "[faults][ddp]") {
  const Jobs jobs;
  for (const Words& start : {Words{}, Words{jobs.launcher(), "--nproc-per-node", "3"}}) {
    check_said_once(jobs, start + Words{"env", "LOCKSTEP_DEBUG=x", ddp()},
                    "LOCKSTEP_DEBUG=x: expected collectives, or nothing");
  }
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
           {{"--ddp", "magic"}, "--ddp: found 'magic', expected bucketed or manual"},
           {{"--all-reduce", "magic"}, "magic"},
           {{"--compress", "fp16"}, "--compress: found 'fp16', expected none or bf16"},
           {{"--compress", "bf16", "--all-reduce", "ring"}, "bf16: found --all-reduce ring, which"},
           {{"--compress", "bf16", "--baseline"}, "--compress bf16: rounds gradients, so"},
           {{"--bucket-mb", "-3"}, "--bucket-mb"},
           {{"--ddp", "manual", "--no-overlap"}, "--no-overlap: found --ddp manual"},
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

/// Of the flight recorder's table.
const std::string kBlamed =
    "rank 0, which gave up first, is not the cause: it waited for rank 1, which waited for rank 2";

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
  CHECK_THAT(unnoticed.err, ContainsSubstring("rank 1 is late: rank 0 has waited in call ") &&
                                ContainsSubstring("; rank 1 exited with status 0"));
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
  CHECK_THAT(wrong.err, ContainsSubstring("the calls differ: call 1 is barrier on rank 0, and "
                                          "all_reduce of 1 f32, sum on rank 1; all ranks"));
  CHECK_THAT(wrong.out, !ContainsSubstring("all ranks went on"));
  CHECK_THAT(lab(jobs, {"rank-conditional-collective", "--fixed"}).out,
             ContainsSubstring("all ranks went on"));
}

TEST_CASE("Lab: the rank that reports a hang is not the cause, nor is the one that it names",
          "[faults][ddp][lab][flight]") {
  const Jobs jobs;
  const ProcessResult wrong = lab(jobs, {"hang-reported-elsewhere", "--timeout", "1"});
  CHECK(wrong.status == 2);
  CHECK_THAT(wrong.err, ContainsSubstring("no answer from rank 1 within 1 s") &&
                            ContainsSubstring("error: rank 0 (pid "));
  CHECK_THAT(wrong.err, ContainsSubstring("rank 2 is late: rank 1 has waited in call 1 ") &&
                            ContainsSubstring("rank 2 has not made that call: look at what its "
                                              "host does after call 1 (barrier)") &&
                            ContainsSubstring(kBlamed));
  for (const std::string rank : {"0", "1", "2"}) {
    CHECK_THAT(lab(jobs, {"hang-reported-elsewhere", "--fixed"}).out,
               ContainsSubstring("rank " + rank + " went on"));
  }
}

// --- Without our launcher ------------------------------------------------------------------------

TEST_CASE("Ranks of no launcher leave files that say the same, whatever killed them",
          "[faults][ddp][flight]") {
  const Jobs jobs;
  const std::string script = fmt::format(
      "set -- \"$@\" --world-size 3 --local-rank 0 --init-method tcp://127.0.0.1:{}; "
      "\"$@\" --rank 2 & late=$!; \"$@\" --rank 1 & \"$@\" --rank 0; wait $!; "
      "kill -KILL $late; wait $late; exit 0",
      free_port());
  jobs.run_words(Words{"sh", "-c", script, "sh", build_dir() + "/04-ddp/labs",
                       "hang-reported-elsewhere", "--timeout", "1", "--flight", jobs / "rec"});
  CHECK(jobs.names() == Words{"rec", "rec.rank1", "rec.rank2"});
  const std::string flight = build_dir() + "/common/launch/flight";
  const ProcessResult told = jobs.run_words({flight, jobs / "rec"});
  INFO(story(told));
  CHECK(told.status == 0);
  CHECK_THAT(told.out, ContainsSubstring("rank 2 is late: rank 1 has waited in call 1 ") &&
                           ContainsSubstring(kBlamed));
  std::filesystem::remove(jobs / "rec.rank2");
  CHECK_THAT(
      jobs.run_words({flight, jobs / "rec"}).out,
      ContainsSubstring("(2 of 3 ranks)") && ContainsSubstring("rank 2 left no recording here"));
  CHECK_THAT(jobs.run_words({flight, jobs / "none"}).err,
             ContainsSubstring("error: --flight ") && ContainsSubstring("there is no such file"));
}

TEST_CASE("A straggler shows in --metrics without a failure", "[faults][ddp][flight]") {
  const Jobs jobs;
  // Rank 1 rests before each of its tasks.
  const std::string script = "[ \"$RANK\" != 1 ] || export LOCKSTEP_CHAOS=1000; exec \"$@\"";
  const ProcessResult run =
      jobs.run_words(Words{jobs.launcher(), "--nproc-per-node", "2", "sh", "-c", script, "sh",
                           ddp(), "--metrics", jobs / "metrics"} +
                     kFewSteps);
  INFO(story(run));
  CHECK(run.status == 0);
  CHECK(run.err.empty());
  const std::vector<double> late = read_json(jobs / "metrics").at("lateness_seconds");
  REQUIRE(late.size() == 2);
  CHECK(late[0] == 0);
  CHECK(late[1] > 0.001);
}

}  // namespace
}  // namespace lockstep
