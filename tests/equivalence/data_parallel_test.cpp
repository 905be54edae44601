// Stage 02 leads to stage 01's weights, on any number of devices and with any batch.

#include <fmt/ranges.h>

#include "common/core/real.h"
#include "tests/equivalence/outcome.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;

Outcome train_on(int devices, const Options& options) {
  return train(options, "02-dataparallel", cpus(devices));
}

/// 50 steps of 12 or 13 samples; the last step has 6 or 10. None of 2, 3, 4 and 8 divides 13, and
/// not all of 8 devices are in use. With this number of samples the highest rate does not diverge.
/// With 642, where it does, 50 steps turn one rounding into 1e-11, in stage 01 with --emulate, too.
Options fifty_steps(int batch_size) {
  return {"--data",       batch_size == 12 ? "synthetic:594:10" : "synthetic:647:10",
          "--workers",    "0",
          "--batch-size", std::to_string(batch_size)};
}

/// With --full at both sizes of the batch, and all numbers of devices at every tolerance.
void check_devices(const Options& options, double tolerance, int short_campaign) {
  for (const int batch_size : {12, 13}) {
    if (batch_size != short_campaign && !full_campaign()) continue;
    const Options all = fifty_steps(batch_size) + options;
    const Outcome single = train(all);
    REQUIRE(single.losses().size() == 50);
    for (const int devices : {1, 2, 3, 4, 8}) {
      if (tolerance > kApart && devices % 3 != 2 && !full_campaign()) continue;
      INFO("batch " << batch_size << ", " << devices << " devices");
      const Outcome several = train_on(devices, all);
      check_equal(several, single, tolerance);
      CHECK((several.file == single.file) == (devices == 1));  // bitwise, or really divided
    }
  }
}

#ifndef LOCKSTEP_DOUBLE  // which has no other precision
TEST_CASE("In 16 bits three devices give the weights of chunks one after another, bit by bit",
          "[equivalence][dataparallel][sixteen]") {
  for (const std::string precision : {"bf16", "fp16"}) {
    const Options options =
        fifty_steps(13) +
        Options{"--lr", "0.01", "--dropout", "--model", "seed-bn", "--precision", precision};
    INFO(precision);
    const Outcome several = train_on(3, options);
    CHECK((several.file == train_in_parts(options, "chunk:3").file));
    CHECK(several.metrics.contains("loss_scale") == (precision == "fp16"));
    const nlohmann::json& bytes = several.metrics.at("bytes_moved");
    CHECK(bytes.at("per_step") == bytes.at("predicted_per_step"));
  }
}
#endif

#ifdef LOCKSTEP_DOUBLE

TEST_CASE("Any number of devices gives stage 01's weights after 50 steps with dropout",
          "[equivalence][dataparallel][row32][row33]") {
  check_devices({"--lr", "0.01", "--dropout"}, kApart, 13);
}

TEST_CASE("Devices give stage 01's weights with momentum at a high rate",
          "[equivalence][dataparallel][row32]") {
  check_devices({"--lr", "0.1", "--momentum", "0.9"}, kApartAtHighRate, 12);
  if (full_campaign())
    check_devices({"--lr", "0.1", "--momentum", "0.9", "--dropout"}, kApartAtHighRate, 12);
}

TEST_CASE("Devices give stage 01's weights with AdamW", "[equivalence][dataparallel]") {
  const Options options = fifty_steps(13) + kAdamW;
  const Outcome single = train(options);
  for (const int devices : full_campaign() ? std::vector{2, 3} : std::vector{3}) {
    check_equal(train_on(devices, options), single, kApart);
  }
}

TEST_CASE("With BatchNorm devices give the weights of parts one after another",
          "[equivalence][dataparallel][row36]") {
  for (const int devices : full_campaign() ? std::vector{2, 3, 4, 8} : std::vector{3}) {
    const Options options = fifty_steps(13) + Options{"--model", "seed-bn", "--lr", "0.01"};
    const Outcome parts = train_in_parts(options, fmt::format("chunk:{}", devices));
    INFO(devices << " devices");
    check_equal(train_on(devices, options), parts, kApart);
  }
}

TEST_CASE("ResNet-18 on devices gives the weights of parts one after another",
          "[equivalence][dataparallel][row36]") {
  const Options options{
      "--data", "synthetic:20:10", "--workers", "0", "--model", "resnet18", "--width", "4", "--lr",
      "0.01",   "--batch-size",    "8"};
  for (const int devices : {2, 3}) {
    const Outcome parts = train_in_parts(options, fmt::format("chunk:{}", devices));
    REQUIRE(parts.losses().size() == 3);
    INFO(devices << " devices");
    check_equal(train_on(devices, options), parts, kApart);
  }
}

#else

TEST_CASE("Any number of devices gives stage 01's weights after 50 steps",
          "[equivalence][dataparallel][row32][row33]") {
  check_devices({"--lr", "0.01"}, 1e-5, 13);
}

TEST_CASE("Dropout masks do not depend on the number of devices", "[equivalence][dataparallel]") {
  const Options options = fifty_steps(13) + Options{"--lr", "0.01", "--dropout"};
  check_equal(train_on(3, options), train(options), 1e-5);
  if (full_campaign()) check_devices({"--lr", "0.01", "--dropout"}, 1e-5, 12);
}

TEST_CASE("With BatchNorm the first losses on devices are those of parts one after another",
          "[equivalence][dataparallel]") {
  const Options options =
      fifty_steps(13) + Options{"--model", "seed-bn", "--lr", "0.01", "--max-steps", "5"};
  const Outcome parts = train_in_parts(options, "chunk:4");
  const Outcome several = train_on(4, options);
  CHECK(largest(difference(several.losses(), parts.losses())) <= 1e-5);
}

#endif

// --- The program's own measurements --------------------------------------------------------------

TEST_CASE("The metrics tell phases, bytes moved and memory per device",
          "[equivalence][dataparallel]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const nlohmann::json metrics = train_on(3, fifty_steps(13)).metrics;
  double seconds = 0;
  for (const char* phase :
       {"scatter", "replicate", "forward", "gather", "loss", "backward", "reduce"}) {
    INFO(phase);
    const double share = metrics.at("phase_seconds").at(phase);
    CHECK(share > 0);
    seconds += share * 50;
  }
  CHECK(metrics.at("phase_seconds").size() == 7);
  CHECK(seconds <= metrics.at("epoch_seconds").at(0).get<double>());
  const nlohmann::json& bytes = metrics.at("bytes_moved");
  CHECK(bytes.at("per_step") > 2 * 2 * 21'840 * sizeof(Real));  // two replicas, there and back
  CHECK(bytes.at("per_step") == bytes.at("predicted_per_step"));
  const nlohmann::json& peak = metrics.at("peak_memory_bytes");
  CHECK(peak.at(0) > peak.at(1));
  CHECK(peak.at(1) >= peak.at(2));
}

TEST_CASE("A device that is named twice trains like two devices",
          "[equivalence][dataparallel][row40]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options = fifty_steps(13) + Options{"--lr", "0.01"};
  const Outcome twice = train(options, "02-dataparallel", "cpu:0,cpu:0");
  CHECK((twice.file == train(options, "02-dataparallel", "cpu:0,cpu:1").file));
  CHECK(twice.metrics.at("devices") == nlohmann::json{"cpu:0", "cpu:0"});
  CHECK(twice.metrics.at("peak_memory_bytes").size() == 2);  // one by one, as `devices` are
}

/// That devices work at the same time: tests/unit/02/replicas_test.cpp.
TEST_CASE("The trace shows the forward of each device", "[equivalence][dataparallel]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const TempDir folder;
  measure({"--data", "synthetic:2048:1", "--batch-size", "256", "--trace", folder / "trace"},
          "02-dataparallel", cpus(2));
  const nlohmann::json trace = read_json(folder / "trace");
  std::map<std::string, int> convolutions;  // by device
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    if (event.value("name", "") == "conv2d") ++convolutions[event.at("pid").dump()];
  }
  REQUIRE(convolutions.size() == 2);
  for (const auto& [device, done] : convolutions) {
    CHECK(done >= 8 * 2);  // 8 steps, two layers; device 0 also evaluates
  }
}

}  // namespace
}  // namespace lockstep
