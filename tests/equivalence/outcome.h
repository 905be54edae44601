#pragma once
// A run of a stage's program, and everything it left.

#include "common/core/real.h"
#include "tests/support/catch.h"
#include "tests/support/json.h"
#include "tests/support/machine.h"
#include "tests/support/stage.h"

namespace lockstep::testing {

using Options = Words;

constexpr bool kDouble = sizeof(Real) == 8;

/// Leaves a case that the double build proves more closely: the others take it with --full.
#define LOCKSTEP_PROVED_IN_DOUBLE \
  if (!kDouble && !full_campaign()) LOCKSTEP_SKIP("only with --full: in the double build always")

/// How far two ways to the same weights may be apart after 50 steps in double precision,
/// relatively. They take sums in different orders, of which the compiler chooses some, and each
/// rounds by 1e-16. At a low rate, and with Adam, that stays: 6e-17 to 2e-16 were measured.
constexpr double kApart = 1e-12;
/// At the rate 0.1 with momentum 0.9 steps enlarge a rounding up to 100,000 times: to between 1e-14
/// and 2e-11, by the seed and the number of samples; those used here to 8e-13 with g++ 12, and
/// to 1.1e-12 with g++ 14. This is a hundred times that. A mistake is enlarged as well: a number of
/// single precision (6e-8), or a sample that is left out, is far above either.
constexpr double kApartAtHighRate = 1e-10;

/// With weight decay, and PyTorch's other values.
const Options kAdamW{"--optimizer", "adamw", "--lr", "0.001", "--weight-decay", "0.1"};
/// Adam moves a number whose gradient is rounding noise by a step of random sign: --eps keeps such
/// steps small.
const Options kCalmAdamW{"--optimizer", "adamw", "--weight-decay", "0.01", "--eps", "1e-3"};

struct Outcome {
  nlohmann::json metrics;
  Weights state;
  std::string file, out;  // the bytes of --save (compare them within (( )): unprintable), stdout

  std::vector<double> losses() const { return metrics.at("losses").get<std::vector<double>>(); }
};

/// A run that saves nothing: a large network's weights take longer to read than a step.
inline Outcome measure(const Options& options, const std::string& stage = "01-single-gpu",
                       const std::string& devices = "cpu:0") {
  const TempDir folder;
  const Options program{stage_binary(stage), "--devices", devices, "--metrics", folder / "metrics"};
  const ProcessResult run = run_process(program + options, kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  return {read_json(folder / "metrics"), {}, {}, run.out};
}

inline Outcome train(const Options& options, const std::string& stage = "01-single-gpu",
                     const std::string& devices = "cpu:0") {
  const TempDir folder;
  Outcome run = measure(options + Options{"--save", folder / "weights"}, stage, devices);
  run.state = read_weights(folder / "weights");
  run.file = read_text(folder / "weights");
  return run;
}

/// Stage 01's result for batches in parts, one after another: "chunk:3", "stride:2" or "micro:4".
inline Outcome train_in_parts(const Options& options, const std::string& parts) {
  return train(options + Options{"--emulate", parts}, "01-single-gpu/reference");
}

/// Stage 01 finds in a run's saved weights the loss and accuracy that the run ended with.
inline void check_evaluated_as_saved(const Outcome& found, const Options& options) {
  const TempDir folder;
  write_file(folder / "weights", found.file);
  const nlohmann::json saved =
      train(options + Options{"--epochs", "0", "--load", folder / "weights"}).metrics;
  CHECK(found.metrics.at("test_loss").back().get<double>() ==
        Approx(saved.at("test_loss").back().get<double>()).epsilon(kDouble ? 1e-12 : 1e-5));
  CHECK(found.metrics.at("accuracy").back() == saved.at("accuracy").back());
}

/// How many samples a run trained on, according to its figures.
inline double samples_of(const Outcome& run) {
  double seconds = 0;
  for (const double epoch : run.metrics.at("epoch_seconds")) seconds += epoch;
  return seconds * run.metrics.at("samples_per_second").get<double>();
}

/// The same weights, losses and work.
inline void check_equal(const Outcome& found, const Outcome& expected, double tolerance) {
  CHECK(relative_l2(found.state, expected.state) <= tolerance);
  CHECK(largest(difference(found.losses(), expected.losses())) <= 100 * tolerance);
  CHECK(found.metrics.at("training_flops") == expected.metrics.at("training_flops"));
  CHECK(samples_of(found) == Approx(samples_of(expected)));
}

}  // namespace lockstep::testing
