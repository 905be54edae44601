// The largest counts that the options allow: whatever else is measured, the run finishes.

#include <filesystem>

#include "tests/support/catch.h"
#include "tests/support/json.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;

/// The metrics of one step with these options on two devices, traced or not.
nlohmann::json one_step(const std::string& stage, Words words, bool traced) {
  const TempDir folder;
  words = Words{stage_binary(stage), "--devices",       "cpu:0,cpu:1", "--max-steps", "1",
                "--metrics",         folder / "metrics"} +
          words;
  if (traced) words = words + Words{"--trace", folder / "trace"};
  const ProcessResult run = run_process(words, kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  if (traced) CHECK(std::filesystem::file_size(folder / "trace") > 1000);
  return read_json(folder / "metrics");
}

const Words kLarge{"--data", "synthetic:1024:10", "--batch-size", "1024"};
const Words kDeep{"--model", "resnet18", "--width", "2"};

TEST_CASE("A batch may be taken in as many micro-batches as the option allows",
          "[faults][counts]") {
  for (const std::string schedule : {"gpipe", "1f1b", "interleaved"}) {
    for (const bool traced : {false, true}) {
      if (!traced && schedule != "1f1b" && !full_campaign()) continue;
      INFO(schedule << (traced ? ", traced" : ""));
      const nlohmann::json metrics =
          one_step("03-model-split",
                   kLarge + Words{"--micro-batches", "1024", "--schedule", schedule}, traced);
      for (const nlohmann::json& stage : metrics.at("stages")) {
        CHECK(stage.at("phase_seconds").at("forward").get<double>() > 0);
        CHECK(stage.at("phase_seconds").at("backward").get<double>() > 0);
      }
    }
  }
  one_step(
      "03-model-split",
      kDeep + Words{"--data", "synthetic:64:10", "--batch-size", "64", "--micro-batches", "64"},
      /*traced=*/true);
}

TEST_CASE("A short batch that is left out has no say in the number of micro-batches",
          "[faults][counts][pipeline]") {
  one_step(
      "03-model-split",
      {"--data", "synthetic:66:10", "--batch-size", "32", "--micro-batches", "4", "--drop-last"},
      /*traced=*/false);
}

TEST_CASE("A step may have as many contributions as the option allows", "[faults][counts][ddp]") {
  const Words words{"--data", "synthetic:2048:10", "--batch-size", "2048", "--accumulate", "1024"};
  for (const bool traced : {false, true}) one_step("04-ddp", words, traced);
  // 17 layers of batch normalisation wait in each.
  const nlohmann::json metrics = one_step(
      "05-syncbn-checkpoint",
      kDeep + Words{"--data", "synthetic:320:10", "--batch-size", "320", "--accumulate", "20"},
      /*traced=*/false);
  CHECK(metrics.at("batch_norm").at("seconds_per_step").get<double>() > 0);
}

}  // namespace
}  // namespace lockstep
