// The programs that measure: their figures fit together.

#include <atomic>
#include <filesystem>
#include <thread>

#include "common/core/cores.h"
#include "tests/support/catch.h"
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

TEST_CASE("A run that had to share its core says so under its summary", "[faults][measuring]") {
  const int core = usable_cores().at(0);
  std::atomic<bool> ends = false;
  std::thread other([&] {
    keep_to({core});
    while (!ends) continue;
  });
  const TempDir folder;
  const ProcessResult run =
      run_process({"taskset", "-c", std::to_string(core), stage_binary("01-single-gpu"), "--data",
                   "synthetic:25600:64", "--devices", "cpu:0", "--metrics", folder / "metrics"},
                  kDeadline);
  ends = true;
  other.join();
  INFO(story(run));
  REQUIRE(run.status == 0);
  const double share = read_json(folder / "metrics").at("share_without_core").at(0);
  CHECK(share > 0.2);
  CHECK(share < 1);
  CHECK_THAT(run.out, ContainsSubstring(fmt::format("\nReady to compute, but without a core: cpu:0 "
                                                    "for {:.0f} % of its time. Something else runs",
                                                    100 * share)));
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
