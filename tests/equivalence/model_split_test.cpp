// Stage 03 leads to stage 01's weights, however the network is cut and the batch divided.

#include <fmt/ranges.h>

#include "common/core/real.h"
#include "tests/equivalence/outcome.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

Outcome train_split(int stages, const Options& options) {
  return train(options, "03-model-split", cpus(stages));
}

/// Split inside the layers.
Outcome train_inside(int ranks, const Options& options) {
  return train(options, "03-model-split/tensor-split", cpus(ranks));
}

/// 50 steps of 12 samples, the last of 8: not all numbers of micro-batches divide 12, nor 8.
Options fifty_steps() {
  return {"--data", "synthetic:596:10", "--workers", "0", "--batch-size", "12"};
}

struct Run {
  int stages, micro_batches;  // or devices of several stages
  std::string schedule;
  int chunks = 1;

  Options options() const {
    return {"--schedule",           schedule,          "--chunks",
            std::to_string(chunks), "--micro-batches", std::to_string(micro_batches)};
  }
  std::string text() const {
    return fmt::format("{} stages, {} chunks, {} micro-batches, {}", stages, chunks, micro_batches,
                       schedule);
  }
};

const std::vector<Run> kFewRuns{{3, 8, "1f1b"}, {2, 4, "interleaved", 2}};

/// All numbers of stages and micro-batches; in the short campaign each of them once or twice.
std::vector<Run> runs() {
  std::vector<Run> all = kFewRuns;
  all.push_back({2, 8, "interleaved", 3});
  all.push_back({3, 6, "interleaved", 2});
  if (!full_campaign()) {
    all.insert(all.end(), {{4, 1, "naive"}, {1, 2, "gpipe"}, {2, 1, "1f1b"}, {4, 4, "gpipe"}});
    return all;
  }
  for (const int stages : {1, 2, 3, 4}) {
    all.push_back({stages, 1, "naive"});
    for (const int micro_batches : {1, 2, 4, 8}) {
      all.push_back({stages, micro_batches, "gpipe"});
      all.push_back({stages, micro_batches, "1f1b"});
    }
  }
  return all;
}

void check_pipelines(const Options& options, double tolerance, const std::vector<Run>& runs) {
  const Options steps = fifty_steps() + options;
  const Outcome single = train(steps);
  REQUIRE(single.losses().size() == 50);
  for (const Run& run : runs) {
    INFO(run.text());
    const Outcome split = train_split(run.stages, steps + run.options());
    check_equal(split, single, tolerance);
    CHECK((split.file == single.file) == (run.micro_batches == 1));  // bitwise, or really divided
  }
}

/// As long as that, split inside the layers; so many all-reduces.
void check_tensor_split(const Options& steps, double tolerance, const std::vector<int>& all_ranks,
                        int all_reduces) {
  const Outcome single = train(steps);
  for (const int ranks : all_ranks) {
    INFO(ranks << " ranks");
    const Outcome split = train_inside(ranks, steps + Options{"--backend", "tcp"});
    CHECK(relative_l2(split.state, single.state) <= tolerance);
    CHECK(largest(difference(split.losses(), single.losses())) <= 100 * tolerance);
    CHECK((split.file == single.file) == (ranks == 1));
    const nlohmann::json& moved = split.metrics.at("tensor_split");
    const nlohmann::json& counted = moved.at("per_step");
    CHECK(counted.at("all_reduces") == (ranks == 1 ? 0 : all_reduces));
    CHECK(counted.at("all_gathers") == 0);
    CHECK(counted.at("bytes").get<double>() ==
          Approx(moved.at("predicted_bytes_per_step").get<double>()).epsilon(1e-3));
    CHECK(split.metrics.at("devices").size() == size_t(ranks));
  }
}

/// 50 steps of the seed networks: conv2 and fc1 need a sum each.
void check_seed_split(const Options& options, double tolerance, const std::vector<int>& ranks) {
  check_tensor_split(fifty_steps() + options, tolerance,
                     full_campaign() ? std::vector{1, 2, 4} : ranks, 2);
}

#ifdef LOCKSTEP_DOUBLE

TEST_CASE("A network split inside its layers leads to stage 01's weights after 50 steps",
          "[equivalence][tensorsplit][row56]") {
  check_seed_split({"--lr", "0.1", "--momentum", "0.9"}, kApartAtHighRate, {1, 4});
  check_seed_split({"--lr", "0.01", "--dropout"}, kApart, {2});
  check_seed_split({"--lr", "0.01", "--model", "seed-bn"}, kApart, {4});
}

TEST_CASE("ResNet-18 split inside its residual blocks leads to stage 01's weights",
          "[equivalence][tensorsplit][row56]") {
  const Options steps{"--data", "synthetic:36:10", "--workers",    "0",  "--model",     "resnet18",
                      "--lr",   "0.001",           "--batch-size", "12", "--max-steps", "3"};
  check_tensor_split(steps + Options{"--width", "4"}, kApart,
                     full_campaign() ? std::vector{2, 4} : std::vector{4}, 16);
  check_tensor_split(steps + Options{"--width", "3"}, kApart, {3}, 16);
}

TEST_CASE("Any pipeline gives stage 01's weights after 50 steps with momentum and dropout",
          "[equivalence][pipeline][row42][row46]") {
  check_pipelines({"--lr", "0.1", "--momentum", "0.9"}, kApartAtHighRate, runs());
  check_pipelines({"--lr", "0.01", "--dropout"}, kApart, full_campaign() ? runs() : kFewRuns);
}

TEST_CASE("A network in pieces leads to stage 01's weights with AdamW",
          "[equivalence][pipeline][tensorsplit]") {
  const Options steps = fifty_steps() + kAdamW;
  const Outcome single = train(steps);
  check_equal(train_split(3, steps + Run{3, 4, "1f1b"}.options()), single, kApart);
  check_equal(train_split(2, steps + Run{2, 3, "gpipe"}.options()), single, kApart);
  CHECK(relative_l2(train_inside(2, steps).state, single.state) <= kApart);
}

TEST_CASE("With BatchNorm a pipeline gives the weights of micro-batches one after another",
          "[equivalence][pipeline][row47]") {
  const Options options = fifty_steps() + Options{"--model", "seed-bn", "--lr", "0.01"};
  const Outcome whole = train(options);
  std::vector<Run> runs{{4, 3, "gpipe"}, {2, 4, "interleaved", 3}};
  if (full_campaign()) runs.insert(runs.end(), {{2, 2, "gpipe"}, {3, 4, "1f1b"}});
  for (const Run& run : runs) {
    INFO(run.text());
    const Outcome parts = train_in_parts(options, fmt::format("micro:{}", run.micro_batches));
    const Outcome split = train_split(run.stages, options + run.options());
    check_equal(split, parts, kApart);
    CHECK(relative_l2(split.state, whole.state) > 1e-3);  // and not those of the whole batch
  }
}

TEST_CASE("ResNet-18 as a pipeline gives the weights of micro-batches one after another",
          "[equivalence][pipeline][row47]") {
  const Options options{
      "--data", "synthetic:20:10", "--workers", "0", "--model", "resnet18", "--width", "4", "--lr",
      "0.01",   "--batch-size",    "10"};
  const Outcome parts = train_in_parts(options, "micro:3");
  for (const Run& run : {Run{2, 3, "gpipe"}, Run{4, 3, "1f1b"}, Run{3, 3, "interleaved", 3}}) {
    INFO(run.text());
    check_equal(train_split(run.stages, options + run.options()), parts, kApart);
  }
}

#else

TEST_CASE("A network split inside its layers leads to stage 01's weights after 50 steps",
          "[equivalence][tensorsplit][row56]") {
  check_seed_split({"--lr", "0.01"}, 1e-5, {2});
}

TEST_CASE("Any pipeline gives stage 01's weights after 50 steps",
          "[equivalence][pipeline][row42][row46]") {
  check_pipelines({"--lr", "0.01"}, 1e-5, full_campaign() ? runs() : kFewRuns);
}

TEST_CASE("With BatchNorm a pipeline's first losses are those of micro-batches in turn",
          "[equivalence][pipeline]") {
  const Options options =
      fifty_steps() + Options{"--model", "seed-bn", "--lr", "0.01", "--max-steps", "5"};
  const Outcome parts = train_in_parts(options, "micro:4");
  const Outcome split = train_split(3, options + Run{3, 4, "1f1b"}.options());
  CHECK(largest(difference(split.losses(), parts.losses())) <= 1e-5);
}

/// 20 steps. The scale of fp16 grows after every second good step, so that gradients overflow in
/// some.
Options in_sixteen_bits(const std::string& precision) {
  const Options options{
      "--data", "synthetic:240:10", "--workers", "0", "--batch-size", "12", "--lr",
      "0.01",   "--precision",      precision};
  return precision == "fp16" ? options + Options{"--growth-interval", "2"} : options;
}

/// Both have skipped the same steps, and some.
void check_skipped(const Outcome& found, const Outcome& expected) {
  CHECK(found.metrics.at("loss_scale") == expected.metrics.at("loss_scale"));
  CHECK(!found.metrics.at("loss_scale").at("skipped_steps").empty());
}

TEST_CASE("In 16 bits a pipeline gives the weights of micro-batches in turn, bit by bit",
          "[equivalence][pipeline][sixteen]") {
  for (const std::string precision : {"bf16", "fp16"}) {
    const Outcome parts = train_in_parts(in_sixteen_bits(precision), "micro:4");
    for (const Run& run : {Run{4, 4, "1f1b"}, Run{2, 4, "interleaved", 2}}) {
      INFO(precision << ", " << run.text());
      const Outcome split = train_split(run.stages, in_sixteen_bits(precision) + run.options());
      check_equal(split, parts, 0);
      if (precision == "fp16") check_skipped(split, parts);
    }
  }
}

TEST_CASE("In 16 bits a pipeline sends half of the bytes", "[equivalence][pipeline][sixteen]") {
  const auto sent = [](const std::string& precision) -> double {
    const Outcome run = train_split(2, in_sixteen_bits(precision));
    const nlohmann::json& bytes = run.metrics.at("bytes_moved");
    CHECK(bytes.at("per_step") == bytes.at("predicted_per_step"));
    return bytes.at("per_step");
  };
  CHECK(sent("bf16") == Approx(0.5 * sent("float32")).epsilon(0.01));
  CHECK(sent("fp16") == Approx(0.5 * sent("float32")).epsilon(0.01));
}

TEST_CASE("In 16 bits a network split inside its layers stays near stage 01's weights",
          "[equivalence][tensorsplit][sixteen]") {
  for (const std::string precision : {"bf16", "fp16"}) {
    INFO(precision);
    const Options steps = in_sixteen_bits(precision);
    const Outcome single = train(steps), split = train_inside(2, steps);
    // The ranks' parts of a sum are rounded before they are added.
    const double apart = relative_l2(split.state, single.state);
    CHECK(apart > 0);
    CHECK(apart <= (precision == "bf16" ? 0.01 : 0.002));
    if (precision == "fp16") check_skipped(split, single);
    const double bytes = split.metrics.at("tensor_split").at("per_step").at("bytes");
    const double whole = train_inside(2, in_sixteen_bits("float32"))
                             .metrics.at("tensor_split")
                             .at("per_step")
                             .at("bytes");
    CHECK(bytes == Approx(0.5 * whole).epsilon(0.01));
  }
}

TEST_CASE("A quarter of ResNet-18 needs far less memory than the whole",
          "[equivalence][pipeline]") {
  // A quarter of the channels needs a sixteenth of the time; --full takes all.
  const Options options{"--data",       "synthetic:64:8",
                        "--model",      "resnet18",
                        "--width",      full_campaign() ? "64" : "16",
                        "--batch-size", "64",
                        "--max-steps",  "1"};
  const int64_t whole = measure(options).metrics.at("peak_memory_bytes").at(0);
  const auto peaks = [&](const std::string& schedule) {
    const Options cut{"--split", "4,6,9", "--schedule", schedule, "--micro-batches", "8"};
    return measure(options + cut, "03-model-split", cpus(4))
        .metrics.at("peak_memory_bytes")
        .get<std::vector<int64_t>>();
  };
  const std::vector<int64_t> gpipe = peaks("gpipe"), one_f1b = peaks("1f1b");
  for (int s = 0; s < 4; ++s) {
    INFO("stage " << s << ": 1F1B " << one_f1b[s] << ", GPipe " << gpipe[s] << ", whole " << whole);
    CHECK(double(one_f1b[s]) < 0.45 * double(whole));
    CHECK(one_f1b[s] < gpipe[s]);
  }
}

#endif

TEST_CASE("Where a network is cut and what is computed twice changes no bit of its weights",
          "[equivalence][pipeline][row51]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options = fifty_steps() + Options{"--dropout", "--max-steps", "10"};
  const Outcome by_hand = train_split(3, options + Options{"--split", "1,4"});
  for (const std::string split : {"auto", "parameters", "measured", "3,6"}) {
    INFO(split);
    CHECK((train_split(3, options + Options{"--split", split}).file == by_hand.file));
  }
  const Outcome twice = train_split(3, options + Options{"--recompute"});
  CHECK((twice.file == by_hand.file));
  const double flops = by_hand.metrics.at("training_flops");
  CHECK(twice.metrics.at("training_flops").get<double>() > 1.2 * flops);
}

// --- The program's own measurements --------------------------------------------------------------

TEST_CASE("The metrics tell the bubble, and what each stage does and keeps",
          "[equivalence][pipeline][row45]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  for (const Run& run : {Run{4, 8, "gpipe"}, Run{4, 8, "1f1b"}}) {
    INFO(run.text());
    const nlohmann::json metrics = train_split(4, fifty_steps() + run.options()).metrics;
    CHECK(metrics.at("bubble").at("predicted") == Approx(3.0 / 11));
    const double bubble = metrics.at("bubble").at("measured");
    CHECK(bubble > 0);
    CHECK(bubble < 1);
    CHECK(metrics.at("peak_memory_bytes").size() == 4);
    REQUIRE(metrics.at("stages").size() == 4);
    int64_t parameters = 0;
    for (int s = 0; s < 4; ++s) {
      const nlohmann::json& stage = metrics.at("stages").at(s);
      CHECK(stage.at("live") == (run.schedule == "gpipe" ? 8 : 4 - s));
      CHECK(stage.at("predicted_live") == stage.at("live"));
      parameters += stage.at("parameter_bytes").get<int64_t>();
      double seconds = 0;
      for (const auto& [phase, value] : stage.at("phase_seconds").items()) {
        seconds += 50 * value.get<double>();
      }
      CHECK(seconds > 0);
      CHECK(seconds <= metrics.at("epoch_seconds").at(0).get<double>());
    }
    CHECK(parameters >= 21'840 * int64_t{sizeof(Real)});
  }
}

TEST_CASE("The metrics of a device with several stages are those of all of them",
          "[equivalence][pipeline][row45]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Run run{2, 4, "interleaved", 2};
  const nlohmann::json metrics = train_split(2, fifty_steps() + run.options()).metrics;
  CHECK(metrics.at("bubble").at("predicted") == Approx(1.0 / 9));
  REQUIRE(metrics.at("stages").size() == 2);
  const std::vector<int> live{5, 3};
  int64_t parameters = 0;
  for (int d = 0; d < 2; ++d) {
    const nlohmann::json& device = metrics.at("stages").at(d);
    CHECK(device.at("live") == live[size_t(d)]);
    CHECK(device.at("predicted_live") == live[size_t(d)]);
    CHECK_THAT(device.at("layers").get<std::string>(), ContainsSubstring(" and "));
    parameters += device.at("parameter_bytes").get<int64_t>();
  }
  CHECK(parameters >= 21'840 * int64_t{sizeof(Real)});
}

TEST_CASE("Several stages may share a device", "[equivalence][pipeline]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Outcome shared = train(fifty_steps(), "03-model-split", "cpu:0,cpu:0,cpu:0");
  CHECK((shared.file == train_split(3, fifty_steps()).file));
}

TEST_CASE("A network split inside its layers is evaluated as the one that is saved",
          "[equivalence][tensorsplit]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options model{"--data", "synthetic:48:50", "--workers", "0",        "--batch-size",
                      "12",     "--model",         "seed-bn",   "--dropout"};
  check_evaluated_as_saved(train_inside(2, model), model);
}

TEST_CASE("What a network in pieces saves, any other stage loads", "[equivalence][row57]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const TempDir folder;
  const Options steps = fifty_steps() + Options{"--save", folder / "pieces"};
  for (const std::string program : {"03-model-split/tensor-split", "03-model-split"}) {
    const Options first{stage_binary(program), "--devices", cpus(4)};
    REQUIRE(run_process(first + steps, kDeadline).status == 0);
    const Options load = fifty_steps() + Options{"--load", folder / "pieces", "--epochs", "0"};
    const Outcome whole = train(load);
    for (const int count : full_campaign() ? std::vector{1, 2, 4} : std::vector{2}) {
      const Outcome again = train(load, program, cpus(count));
      CHECK((again.file == whole.file));
      CHECK(largest(difference(again.metrics.at("test_loss").get<std::vector<double>>(),
                               whole.metrics.at("test_loss").get<std::vector<double>>())) <= 1e-6);
    }
  }
}

}  // namespace
}  // namespace lockstep
