// The programs that measure: their figures fit together.

#include <sched.h>
#include <sys/types.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <stop_token>
#include <thread>

#include "common/core/host.h"
#include "tests/support/catch.h"
#include "tests/support/jobs.h"
#include "tests/support/json.h"
#include "tests/support/machine.h"
#include "tests/support/stage.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

/// The rows that a stage's additional program writes.
nlohmann::json rows_of(const std::string& stage, const std::string& program, const Words& options) {
  const TempDir folder;
  const auto beside = std::filesystem::path(stage_binary(stage)).parent_path() / program;
  const ProcessResult run =
      run_process(Words{beside} + options + Words{"--metrics", folder / "rows"}, kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  return read_json(folder / "rows");
}

/// The cores that the thread of another process may use which has computed most.
Cores cores_of_busiest_thread(pid_t process) {
  double most = -1;
  Cores cores;
  for (const auto& task :
       std::filesystem::directory_iterator(fmt::format("/proc/{}/task", process))) {
    double computed_ns = 0;
    std::ifstream(task.path() / "schedstat") >> computed_ns;
    cpu_set_t allowed;
    const pid_t thread = std::stoi(task.path().filename());
    if (computed_ns <= most || ::sched_getaffinity(thread, sizeof allowed, &allowed) != 0) continue;
    most = computed_ns;
    cores.clear();
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &allowed)) cores.push_back(core);
    }
  }
  return cores;
}

/// Something that keeps one core busy.
class BusyCore {
 public:
  explicit BusyCore(int core) {
    thread_ = std::jthread([core](const std::stop_token& end) {
      keep_to({core});
      while (!end.stop_requested()) continue;
    });
  }

 private:
  std::jthread thread_;
};

TEST_CASE("The bandwidth of an all-reduce is a ring's bytes in the time that it took",
          "[faults][measuring][ddp]") {
  const nlohmann::json rows = rows_of(
      "04-ddp", "message-sizes",
      {"--devices", cpus(3), "--kib", "1,4", "--all-reduce", "ring,library", "--rounds", "5"});
  REQUIRE(rows.size() == 4);
  for (size_t i = 0; i < rows.size(); ++i) {
    const nlohmann::json& row = rows[i];
    CHECK(row.at("all_reduce") == (i % 2 == 0 ? "ring" : "library"));
    CHECK(row.at("world_size") == 3);
    CHECK(row.at("timed_by") == "host");
    CHECK(row.at("bytes") == (i < 2 ? 1024 : 4096));
    const double seconds = row.at("seconds"), bandwidth = row.at("bus_bytes_per_second");
    CHECK(seconds > 0);
    CHECK(bandwidth * seconds == Approx(2.0 * 2 / 3 * row.at("bytes").get<double>()));
  }
}

TEST_CASE("A run counts the time before its first step from its own start", "[faults][measuring]") {
  const TempDir folder;
  const auto begin = Clock::now();
  const ProcessResult run = run_stage01(
      {"--data", "synthetic:8:8", "--batch-size", "8", "--metrics", folder / "metrics"}, kDeadline);
  const double all = seconds_since(begin);
  INFO(story(run));
  REQUIRE(run.status == 0);
  const double startup = read_json(folder / "metrics").at("startup_seconds");
  CHECK(startup > 0);
  CHECK(startup <= all + 0.02);  // the system notes the start in hundredths
}

/// Images for some tenths of a second of training, without and with AddressSanitizer.
#if defined(__SANITIZE_ADDRESS__)
constexpr const char* kSharedRun = "synthetic:640:64";
#else
constexpr const char* kSharedRun = "synthetic:9600:64";
#endif

TEST_CASE("A run that had to share its core says so under its summary", "[faults][measuring]") {
  const int core = usable_cores().at(0);
  const BusyCore busy(core);
  const TempDir folder;
  const ProcessResult run =
      run_process({"taskset", "-c", std::to_string(core), stage_binary("01-single-gpu"), "--data",
                   kSharedRun, "--devices", "cpu:0", "--metrics", folder / "metrics"},
                  kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  const nlohmann::json metrics = read_json(folder / "metrics");
  const double share = metrics.at("share_without_core").at(0);
  CHECK(share > metrics.at("noticed_without_core"));
  CHECK(share > 0.2);
  CHECK(share < 1);
  CHECK_THAT(run.out, ContainsSubstring(fmt::format("\nReady to compute, but without a core: cpu:0 "
                                                    "for {:.0f} % of its time. Something else runs",
                                                    100 * share)));
}

TEST_CASE("Rank 0 says it for the rank whose core was taken", "[faults][measuring]") {
  const Cores cores = usable_cores();
  if (cores.size() < 2) LOCKSTEP_SKIP("needs two cores");
  const BusyCore busy(cores[1]);
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(
      {"taskset", "-c", fmt::format("{},{}", cores[0], cores[1]), stage_binary("04-ddp"), "--data",
       kSharedRun, "--devices", "cpu:0,cpu:1", "--metrics", jobs / "metrics"});
  INFO(story(run));
  REQUIRE(run.status == 0);
  const std::vector<double> shares = read_json(jobs / "metrics").at("share_without_core");
  REQUIRE(shares.size() == 2);
  CHECK(shares[1] > 0.2);
  CHECK_THAT(run.out, ContainsSubstring(fmt::format("cpu:1 for {:.0f} %", 100 * shares[1])));
}

TEST_CASE("Ranks compute on their own part of the cores, with --no-bind on all",
          "[faults][cores]") {
  const Cores all = usable_cores();
  if (all.size() < 2) LOCKSTEP_SKIP("needs two cores");
  const std::string option = GENERATE("", "--no-bind");
  CAPTURE(option);
  const Jobs jobs;
  auto running = jobs.begin({"--nproc-per-node", "2", "--redirect", jobs / "out"},
                            Words{stage_binary("04-ddp"), "--devices", "cpu:0,cpu:1", "--data",
                                  "synthetic:640:64", "--epochs", "100000", "--log-interval", "1"} +
                                (option.empty() ? Words{} : Words{option}));
  const std::vector<pid_t> ranks = jobs.ranks(2, "04-ddp");
  REQUIRE(ranks.size() == 2);
  REQUIRE(jobs.soon_says("out/rank_0.out", "Train Epoch: 1"));
  const size_t half = all.size() / 2;
  const Cores parts[] = {{all.begin(), all.begin() + half},
                         {all.begin() + half, all.begin() + 2 * half}};
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK(cores_of_busiest_thread(ranks[rank]) == (option.empty() ? parts[rank] : all));
  }
  REQUIRE(::kill(ranks[0], SIGTERM) == 0);
  CHECK(running.get().status != 0);
}

/// What a stage's summary and its metrics say of the bytes that rank 0 sends in a step.
struct BytesRow {
  BytesRow(const std::string& program, const Words& options,
           const std::vector<std::pair<std::string, std::string>>& environment = {}) {
    const TempDir folder;
    const ProcessResult run = run_process(
        Words{program, "--devices", cpus(2), "--model", "seed", "--data", "synthetic:64:16",
              "--batch-size", "8", "--workers", "0", "--metrics", folder / "metrics"} +
            options,
        kDeadline, environment);
    INFO(story(run));
    REQUIRE(run.status == 0);
    const size_t at = run.out.find("  bytes per step      ");
    REQUIRE(at != std::string::npos);
    row = run.out.substr(at + 22, run.out.find('\n', at) - at - 22);
    const nlohmann::json bytes = read_json(folder / "metrics").at("bytes_per_step");
    sent = bytes.at("sent");
    predicted = bytes.at("predicted");
    CHECK_THAT(row, Catch::Matchers::StartsWith(fmt::format("{:.0f} of ", sent)));
    CHECK_THAT(row, ContainsSubstring(fmt::format("model is {:.0f} (", predicted)));
  }
  std::string row;
  double sent = 0, predicted = 0;
};

TEST_CASE("A message too many, or too few, stands in the summary beside the formula",
          "[faults][measuring][ddp][sharded]") {
  const std::string ddp = stage_binary("04-ddp");
  const BytesRow exact(ddp, {});
  CHECK_THAT(exact.row, ContainsSubstring("of gradients sent by rank 0, counted in shm; 2(W-1)/W"));
  CHECK(exact.sent == Approx(exact.predicted).epsilon(0.01));  // gaps between parameters
  // With each sum goes a message that compares the ranks' calls: nine whole numbers.
  const BytesRow more(ddp, {}, {{"LOCKSTEP_DEBUG", "collectives"}});
  CHECK(more.sent == exact.sent + 9 * 8);
  CHECK(more.predicted == exact.predicted);
  // Half of what the optimizer's shards need: no rank gets what the others have updated.
  const Words options{"--shard", "optimizer"};
  const BytesRow sharded(stage_binary("06-fully-sharded"), options);
  CHECK_THAT(sharded.row, Catch::Matchers::EndsWith("(+0.0 %)"));
  CHECK(sharded.sent == sharded.predicted);
  const BytesRow less(build_dir() + "/tests/faults/forgetful-stage06", options);
  CHECK_THAT(less.row, Catch::Matchers::EndsWith("(-50.0 %)"));
  CHECK(2 * less.sent == sharded.sent);
  CHECK(less.predicted == sharded.predicted);
}

TEST_CASE("Equal layers sleep for a batch, in however many micro-batches it comes",
          "[faults][measuring][pipeline]") {
  const nlohmann::json rows = rows_of("03-model-split", "bubble",
                                      {"--stages", "1", "--micro-batches", "1,16", "--schedules",
                                       "gpipe", "--sleep", "1", "--steps", "2"});
  REQUIRE(rows.size() == 2);
  const double whole = rows[0].at("step_seconds"), parts = rows[1].at("step_seconds");
  CHECK(parts < 8 * whole);  // waking up takes its time, sixteen times
}

}  // namespace
}  // namespace lockstep
