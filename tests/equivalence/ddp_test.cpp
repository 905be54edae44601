// Stage 04 leads to stage 01's weights: any number of ranks, any way of reducing, any batch.

#include <fmt/format.h>

#include "common/core/real.h"
#include "tests/equivalence/outcome.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

/// Started bare, so that the program starts its ranks itself.
Outcome train_ranks(int ranks, const Options& options) {
  return train(options, "04-ddp", cpus(ranks));
}

/// 50 steps of 12 samples, the last of 6; or of 13, the last of 10: no number of ranks from 2 on
/// divides those evenly. In stage 04's default order.
Options steps_of(int batch_size) {
  return {"--data",       batch_size == 12 ? "synthetic:594:10" : "synthetic:647:10",
          "--workers",    "0",
          "--batch-size", std::to_string(batch_size),
          "--order",      "sampler"};
}

constexpr double kTolerance = kDouble ? kApart : 1e-5;

/// With --full at both sizes of the batch, and all numbers of ranks at every tolerance.
void check_ranks(const Options& options, double tolerance, int short_campaign) {
  for (const int batch_size : {12, 13}) {
    if (batch_size != short_campaign && !full_campaign()) continue;
    const Options all = steps_of(batch_size) + options;
    const Outcome single = train(all);
    REQUIRE(single.losses().size() == 50);
    for (const int ranks : {1, 2, 3, 4}) {
      if (tolerance > kTolerance && ranks % 2 != 0 && !full_campaign()) continue;
      INFO("batch " << batch_size << ", " << ranks << " ranks");
      const Outcome several = train_ranks(ranks, all);
      check_equal(several, single, tolerance);
      CHECK(several.metrics.at("devices").size() == size_t(ranks));
      CHECK(several.metrics.at("accuracy") == single.metrics.at("accuracy"));
    }
  }
}

/// Ten steps of 12 samples and one of a single sample, which leaves ranks without any.
TEST_CASE("With BatchNorm a rank without samples takes part in the others' step",
          "[equivalence][ddp][row87]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options{
      "--data", "synthetic:121:10", "--workers", "0",       "--batch-size", "12", "--lr",
      "0.01",   "--order",          "sampler",   "--model", "seed-bn"};
  for (const int ranks : {2, 3}) {
    const Outcome parts = train_in_parts(options, fmt::format("stride:{}", ranks));
    for (const Options& way :
         std::vector<Options>{{"--ddp", "bucketed"}, {"--ddp", "manual"}, {"--backend", "tcp"}}) {
      INFO(ranks << " ranks, " << way[0] << " " << way[1]);
      const Outcome several = train_ranks(ranks, options + way);
      REQUIRE(several.losses().size() == 11);
      // float: only losses, and roundings grow in networks with BatchNorm
      CHECK(largest(difference(several.losses(), parts.losses())) <=
            (sizeof(Real) == 8 ? 1e-10 : 1e-2));
    }
  }
}

TEST_CASE("With BatchNorm all ranks evaluate the network that is saved, rank 0's",
          "[equivalence][ddp][row88]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options{
      "--data", "synthetic:120:40", "--workers", "0", "--batch-size", "12", "--lr",
      "0.01",   "--model",          "seed-bn"};
  check_evaluated_as_saved(train_ranks(3, options), options);
}

#ifdef LOCKSTEP_DOUBLE

TEST_CASE("Any number of ranks gives stage 01's weights after 50 steps with dropout",
          "[equivalence][ddp][row75]") {
  check_ranks({"--lr", "0.01", "--dropout"}, kTolerance, 13);
}

TEST_CASE("Ranks give stage 01's weights with momentum at a high rate",
          "[equivalence][ddp][row75]") {
  check_ranks({"--lr", "0.1", "--momentum", "0.9"}, kApartAtHighRate, 12);
}

TEST_CASE("Ranks give stage 01's weights with AdamW, and with Adam", "[equivalence][ddp]") {
  for (const Options& optimizer : {kAdamW, Options{"--optimizer", "adam", "--lr", "0.001",
                                                   "--betas", "0.8,0.99", "--eps", "1e-3"}}) {
    const Options options = steps_of(13) + optimizer;
    const Outcome single = train(options);
    REQUIRE(single.losses().size() == 50);
    for (const int ranks : full_campaign() ? std::vector{2, 3} : std::vector{3}) {
      check_equal(train_ranks(ranks, options), single, kTolerance);
    }
  }
}

#ifndef LOCKSTEP_DOUBLE  // which has no other precision
TEST_CASE("In bf16 two ranks give the weights of strided parts one after another, bit by bit",
          "[equivalence][ddp][sixteen]") {
  for (const std::string model : {"seed", "seed-bn"}) {
    const Options options{
        "--data",  "synthetic:120:10", "--workers",    "0",  "--model",     model, "--lr", "0.01",
        "--order", "sampler",          "--batch-size", "12", "--precision", "bf16"};
    INFO(model);
    const Outcome several = train_ranks(2, options);
    check_equal(several, train_in_parts(options, "stride:2"), 0);
    // A batch in one pass rounds each gradient of weights once, not twice: near, but elsewhere.
    const double apart = relative_l2(several.state, train(options).state);
    CHECK(apart > 0);
    CHECK(apart <= 0.01);
  }
}

TEST_CASE("In fp16 two ranks skip the same steps, and stay near strided parts one after another",
          "[equivalence][ddp][sixteen]") {
  // The scale grows after every second good step, so that gradients overflow in some.
  const Options options{"--data",
                        "synthetic:240:10",
                        "--workers",
                        "0",
                        "--lr",
                        "0.01",
                        "--order",
                        "sampler",
                        "--batch-size",
                        "12",
                        "--growth-interval",
                        "2",
                        "--precision",
                        "fp16"};
  const Outcome several = train_ranks(2, options), alone = train_in_parts(options, "stride:2");
  CHECK(several.metrics.at("loss_scale") == alone.metrics.at("loss_scale"));
  CHECK(!several.metrics.at("loss_scale").at("skipped_steps").empty());
  // A rank's gradient is that of its own mean: twice as large as the part of the whole batch's, so
  // that its smallest numbers are rounded to other digits.
  CHECK(relative_l2(several.state, alone.state) <= 1e-4);
}
#endif

TEST_CASE("With BatchNorm ranks give the weights of strided parts one after another",
          "[equivalence][ddp][row87]") {
  for (const int ranks : full_campaign() ? std::vector{2, 3} : std::vector{3}) {
    const Options options = steps_of(13) + Options{"--model", "seed-bn", "--lr", "0.01"};
    const Outcome parts = train_in_parts(options, fmt::format("stride:{}", ranks));
    for (const std::string ddp : {"bucketed", "manual"}) {
      INFO(ranks << " ranks, --ddp " << ddp);
      check_equal(train_ranks(ranks, options + Options{"--ddp", ddp}), parts, kTolerance);
    }
  }
}

#else

TEST_CASE("Any number of ranks gives stage 01's weights after 50 steps",
          "[equivalence][ddp][row75]") {
  check_ranks({"--lr", "0.01"}, kTolerance, 13);
}

TEST_CASE("Dropout masks do not depend on the number of ranks", "[equivalence][ddp]") {
  const Options options = steps_of(13) + Options{"--lr", "0.01", "--dropout"};
  check_equal(train_ranks(3, options), train(options), kTolerance);
}

#endif

/// The short campaign has some of them only together.
std::vector<Options> ways_of_reducing() {
  std::vector<Options> ways{
      {"--ddp", "manual", "--all-reduce", "ring"},   {"--backend", "tcp"},    {"--accumulate", "2"},
      {"--all-reduce", "naive", "--bucket-mb", "0"}, {"--bucket-mb", "0.01"}, {"--no-overlap"},
      {"--accumulate", "3", "--ddp", "manual"}};
  if (full_campaign()) {
    ways.insert(ways.end(), {{"--ddp", "manual"}, {"--all-reduce", "ring"}, {"--bucket-mb", "0"}});
  }
  return ways;
}

TEST_CASE("Every way of reducing gives stage 01's weights", "[equivalence][ddp][row79]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options = steps_of(13) + Options{"--lr", "0.01"};
  const Outcome single = train(options);
  for (const Options& way : ways_of_reducing()) {
    INFO(way[0] << " " << way.back());
    check_equal(train_ranks(3, options + way), single, kTolerance);
  }
}

TEST_CASE("A layer that every second step leaves out is left out by every stage alike",
          "[equivalence][ddp][dataparallel][pipeline][tensorsplit][row84]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options all = steps_of(12) + Options{"--model", "seed-skip", "--max-steps", "6"};
  Options options;
  for (const Options& optimizer :
       {Options{"--lr", "0.01", "--momentum", "0.5", "--weight-decay", "0.5"},
        Options{"--optimizer", "adamw", "--weight-decay", "0.5", "--eps", "1e-3"}}) {
    options = all + optimizer;
    const Outcome single = train(options);
    for (const auto& [stage, more] :
         std::vector<std::pair<std::string, Options>>{{"02-dataparallel", {}},
                                                      {"03-model-split", {"--micro-batches", "3"}},
                                                      {"04-ddp", {"--find-unused-parameters"}},
                                                      {"04-ddp", {"--ddp", "manual"}}}) {
      INFO(optimizer[1] << " " << stage);
      check_equal(train(options + more, stage, cpus(2)), single, kTolerance);
    }
    const Outcome inside = train(options, "03-model-split/tensor-split", cpus(2));
    CHECK(relative_l2(inside.state, single.state) <= kTolerance);
  }
  const ProcessResult refused =
      run_process(Options{stage_binary("04-ddp"), "--devices", cpus(2)} + options, kDeadline);
  CHECK(refused.status == 1);
  CHECK(refused.err.find(
            "no gradient of extra.inner.bias, extra.inner.weight in this backward; leave such "
            "layers out of the network, or allow that (--find-unused-parameters)") !=
        std::string::npos);
}

TEST_CASE("Equal shards are the same with and without padding, unequal ones are not",
          "[equivalence][ddp][row92]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const auto run = [](int batch_size, const Options& more) {
    return train_ranks(2, steps_of(batch_size) + Options{"--lr", "0.01"} + more);
  };
  check_equal(run(12, {"--pad"}), run(12, {}), kTolerance);
  const TempDir folder;
  const ProcessResult refused = run_process(
      Options{stage_binary("04-ddp"), "--devices", cpus(2), "--pad"} + steps_of(13), kDeadline);
  CHECK(refused.status == 1);
  CHECK(refused.err.find("--pad: equal parts of a global batch of 13 for 2 ranks") !=
        std::string::npos);
}

TEST_CASE("A clipped gradient is that of one process", "[equivalence][ddp][row91]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options = steps_of(13) + Options{"--lr", "0.01", "--clip-norm", "0.1"};
  const Outcome one = train_ranks(1, options), three = train_ranks(3, options);
  check_equal(three, one, kTolerance);
  CHECK(relative_l2(one.state, train_ranks(1, steps_of(13) + Options{"--lr", "0.01"}).state) >
        1e-3);
}

// --- Gradients in 16 bits
// --------------------------------------------------------------------------

TEST_CASE("With gradients in bf16 the weights are near stage 01's, for half of the bytes",
          "[equivalence][ddp][sixteen]") {
  const Options options = steps_of(12) + Options{"--lr", "0.01"}, bf16{"--compress", "bf16"};
  if (kDouble) {
    const ProcessResult run = run_process(
        Options{stage_binary("04-ddp"), "--devices", cpus(2)} + options + bf16, kDeadline);
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring("--compress bf16: rounds float32, and this build "
                                          "computes in float64, for proofs; take one with"));
    return;
  }
  const Outcome single = train(options), half = train_ranks(2, options + bf16);
  const double apart = relative_l2(half.state, single.state);
  CHECK((apart > 1e-6 && apart < 1e-3));
  const nlohmann::json& bytes = half.metrics.at("bytes_per_step");
  CHECK(bytes.at("predicted") == 21'840 * 2);
  CHECK(bytes.at("sent").get<double>() == Approx(21'840 * 2).epsilon(0.02));
  CHECK_THAT(half.out, ContainsSubstring("2(W-1)/W times the model in bf16 is 43680"));
}

// --- The program's own measurements --------------------------------------------------------------

TEST_CASE("The metrics tell times and bytes per step", "[equivalence][ddp][row130]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  for (const std::string all_reduce : {"ring", "library"}) {
    INFO(all_reduce);
    const nlohmann::json metrics =
        train_ranks(3, steps_of(12) + Options{"--all-reduce", all_reduce}).metrics;
    const nlohmann::json& seconds = metrics.at("per_step_seconds");
    for (const char* part : {"compute", "communication", "exposed_communication"}) {
      CHECK(seconds.at(part).get<double>() > 0);
    }
    const nlohmann::json& bytes = metrics.at("bytes_per_step");
    const double sent = bytes.at("sent"), predicted = bytes.at("predicted");
    CHECK(predicted == Approx(2.0 * 2 / 3 * 21'840 * sizeof(Real)));
    CHECK(std::abs(sent - predicted) <= 0.05 * predicted);
  }
}

TEST_CASE("Rank 0 alone speaks and writes", "[equivalence][ddp][row90]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const TempDir folder;
  const ProcessResult run = run_process(
      Options{stage_binary("04-ddp"), "--devices", cpus(2), "--trace", folder / "trace", "--save",
              folder / "weights", "--metrics", folder / "metrics", "--log-interval", "10"} +
          steps_of(12),
      kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  CHECK(folder.names() == Words{"metrics", "trace", "trace.rank1", "weights"});
  size_t lines = 0, tests = 0;
  for (size_t at = 0; (at = run.out.find("Train Epoch", at)) != std::string::npos; ++at) ++lines;
  for (size_t at = 0; (at = run.out.find("Test set", at)) != std::string::npos; ++at) ++tests;
  CHECK(lines == 5);
  CHECK(tests == 1);
  CHECK(run.out.find("2 ranks over ") != std::string::npos);
  const std::string uneven = train_ranks(3, steps_of(13) + Options{"--max-steps", "1"}).out;
  CHECK(uneven.find(": global batch 13 = 3 x at most 5 samples; ") != std::string::npos);
}

}  // namespace
}  // namespace lockstep
