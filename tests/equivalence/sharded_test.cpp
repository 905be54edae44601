// Stage 06 leads to stage 01's weights: any number of ranks, whatever they share out.

#include <fmt/format.h>

#include <map>

#include "tests/equivalence/outcome.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

const std::vector<std::string> kWays = kDouble || full_campaign()
                                           ? Words{"none", "optimizer", "gradients", "parameters"}
                                           : Words{"optimizer", "parameters"};

const Options kSgd{"--optimizer", "sgd", "--lr", "0.01"};

double tolerance(const Options& optimizer) {
  return kDouble ? kApart : optimizer == kSgd ? 1e-5 : 1e-4;
}

Outcome train_sharded(int ranks, const Options& options) {
  return train(options + Options{"--model", "seed"}, "06-fully-sharded", cpus(ranks));
}

/// 50 steps of 13 samples, the last of 10: no number of ranks from 2 on divides them evenly.
Options sharded_steps(const Options& more) {
  return Options{"--data", "synthetic:647:10", "--workers", "0", "--batch-size",
                 "13",     "--order",          "sampler"} +
         more;
}

void check_all_ways(const Options& options, double tolerance) {
  const Outcome single = train(options);
  REQUIRE(single.losses().size() == 50);
  for (const std::string& way : kWays) {
    for (const int ranks : {1, 2, 3, 4}) {
      const bool short_campaign =
          ranks == 3 || (tolerance == kApartAtHighRate && way == "parameters");
      if (!short_campaign && !full_campaign()) continue;
      INFO(way << ", " << ranks << " ranks");
      const Outcome several = train_sharded(ranks, options + Options{"--shard", way});
      check_equal(several, single, tolerance);
      CHECK(several.metrics.at("accuracy") == single.metrics.at("accuracy"));
    }
  }
}

TEST_CASE("Whatever the ranks share out, SGD gives stage 01's weights after 50 steps",
          "[equivalence][sharded]") {
  if (kDouble) {
    check_all_ways(
        sharded_steps({"--lr", "0.1", "--momentum", "0.9", "--weight-decay", "0.001", "--dropout"}),
        kApartAtHighRate);
  } else {
    check_all_ways(sharded_steps(kSgd), tolerance(kSgd));
  }
}

TEST_CASE("Whatever the ranks share out, AdamW gives stage 01's weights after 50 steps",
          "[equivalence][sharded]") {
  check_all_ways(sharded_steps(kCalmAdamW), tolerance(kCalmAdamW));
}

/// AdamW has a state to share out, and at this eps a gradient's size shows.
std::vector<Options> optimizers() {
  return full_campaign() ? std::vector<Options>{kCalmAdamW, kSgd}
                         : std::vector<Options>{kCalmAdamW};
}

const std::vector<Options> kVariations{{"--accumulate", "3"},
                                       {"--unit", "block", "--prefetch", "2"},
                                       {"--reshard-after-forward", "no", "--prefetch", "0"},
                                       {"--unit", "model"},
                                       {"--unit", "0.05", "--prefetch", "3"},
                                       {"--shard", "gradients", "--accumulate", "2"},
                                       {"--shard", "optimizer", "--accumulate", "2"},
                                       {"--shard", "optimizer", "--unit", "model"},
                                       {"--backend", "tcp"},
                                       {"--backend", "gloo"}};

TEST_CASE("However units are cut, fetched and freed, the weights are stage 01's",
          "[equivalence][sharded]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  for (const Options& optimizer : optimizers()) {
    const Options options = sharded_steps(optimizer + Options{"--max-steps", "20"});
    const Outcome single = train(options);
    for (const Options& way : kVariations) {
      for (const int ranks : full_campaign() ? std::vector{1, 2, 3, 4} : std::vector{3}) {
        INFO(optimizer[1] << " " << way[0] << " " << way[1] << " " << way.back() << ", " << ranks);
        check_equal(train_sharded(ranks, options + way), single, tolerance(optimizer));
      }
    }
  }
}

TEST_CASE("The norm that is clipped is that of all shards", "[equivalence][sharded]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  for (const Options& optimizer : optimizers()) {
    const Options options =
        sharded_steps(optimizer + Options{"--clip-norm", "0.1", "--max-steps", "20"});
    const Outcome one = train(options, "04-ddp", "cpu:0");
    for (const std::string& way : kWays) {
      for (const int ranks : full_campaign() ? std::vector{1, 2, 3, 4} : std::vector{3}) {
        INFO(optimizer[1] << " " << way << ", " << ranks << " ranks");
        const Outcome several = train_sharded(ranks, options + Options{"--shard", way});
        check_equal(several, one, tolerance(optimizer));
      }
    }
  }
}

/// Ten steps of 12 samples and one of a single sample, which leaves ranks without any.
TEST_CASE("Synchronised batch normalisation and empty parts, sharded", "[equivalence][sharded]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options =
      kSgd + Options{"--data", "synthetic:121:10", "--workers", "0",       "--batch-size",
                     "12",     "--order",          "sampler",   "--model", "seed-bn"};
  const Outcome single = train(options);
  for (const std::string& way : kWays) {
    INFO(way);
    const Outcome several = train(options + Options{"--shard", way}, "06-fully-sharded", cpus(3));
    REQUIRE(several.losses().size() == 11);
    for (size_t step = 0; step < (kDouble ? 11 : 2); ++step) {
      CHECK(std::abs(several.losses()[step] - single.losses()[step]) <= (kDouble ? 1e-10 : 1e-4));
    }
    if (kDouble) check_equal(several, single, 1e-10);
  }
}

TEST_CASE("A layer that every second step leaves out stays as it is, whatever is shared out",
          "[equivalence][sharded]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  for (const Options& optimizer :
       {kSgd + Options{"--momentum", "0.5", "--weight-decay", "0.5"},
        Options{"--optimizer", "adamw", "--weight-decay", "0.5", "--eps", "1e-3"}}) {
    const Options options =
        sharded_steps(optimizer + Options{"--model", "seed-skip", "--max-steps", "6"});
    const Outcome single = train(options);
    for (const std::string& way : kWays) {
      INFO(optimizer[1] << " " << way);
      check_equal(train(options + Options{"--shard", way}, "06-fully-sharded", cpus(2)), single,
                  tolerance(kCalmAdamW));
    }
  }
}

TEST_CASE("Dropout in micro-batches, and a norm that is clipped, are those of one whole batch",
          "[equivalence][ddp][syncbn][sharded]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options = sharded_steps(
      kSgd + Options{"--model", "seed", "--dropout", "--clip-norm", "0.1", "--max-steps", "8"});
  const Outcome whole = train(options, "04-ddp", "cpu:0");
  for (const std::string stage : {"04-ddp", "05-syncbn-checkpoint", "06-fully-sharded"}) {
    INFO(stage);
    check_equal(train(options + Options{"--accumulate", "3"}, stage, cpus(2)), whole,
                tolerance(kSgd));
  }
}

TEST_CASE("Sharded ranks that normalise by themselves evaluate the network that is saved",
          "[equivalence][sharded]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options{"--data", "synthetic:104:40", "--workers", "0", "--model", "seed-bn"};
  check_evaluated_as_saved(
      train(options + kSgd + Options{"--batch-size", "13", "--order", "sampler", "--no-sync-bn"},
            "06-fully-sharded", cpus(2)),
      options);
}

/// 20 test images in batches of 3, for 3 ranks: rank 0 has 7 of them, the others 7 and 6. In
/// evaluation, too, all ranks must gather equally often.
TEST_CASE("Ranks with unequally many test batches evaluate together", "[equivalence][sharded]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options{"--data", "synthetic:30:13", "--workers", "0", "--batch-size", "9", "--lr",
                        "0.01",   "--order",         "sampler"};
  const Outcome several = train_sharded(3, options);
  check_evaluated_as_saved(several, {"--data", "synthetic:30:13", "--workers", "0"});
  CHECK_FALSE(several.metrics.contains("batch_norm"));  // a network that has none
}

/// What a rank sends in a step: halves of an all-reduce over the padded model.
TEST_CASE("The bytes of a step are those of the formula", "[equivalence][sharded]") {
  const auto bytes = [](const Options& more) {
    return measure(sharded_steps({"--max-steps", "4", "--model", "seed"}) + more,
                   "06-fully-sharded", cpus(2))
        .metrics.at("bytes_per_step");
  };
  for (const std::string& way : kWays) {
    const double padded = 21'840 * sizeof(Real);  // and padding below 1 %
    const int halves = way == "parameters" ? 3 : 2;
    const nlohmann::json found = bytes({"--shard", way});
    INFO(way << found.dump());
    CHECK(found.at("sent") == found.at("predicted"));
    CHECK(found.at("sent").get<double>() == Approx(halves * padded / 2).epsilon(0.02));
  }
  const nlohmann::json kept = bytes({"--reshard-after-forward", "no"});
  CHECK(kept.at("sent") == kept.at("predicted"));
  CHECK(kept.at("sent").get<double>() == Approx(2 * 21'840 * sizeof(Real) / 2.0).epsilon(0.02));
  const nlohmann::json accumulated = bytes({"--accumulate", "2"});
  CHECK(accumulated.at("sent") == accumulated.at("predicted"));
}

TEST_CASE("With messages in bf16 the weights are near stage 01's, for half of the bytes",
          "[equivalence][sharded][sixteen]") {
  const Options options = sharded_steps({"--max-steps", "12", "--model", "seed"}) + kSgd,
                types{"--param-dtype", "bf16", "--reduce-dtype", "bf16"};
  if (kDouble) {
    const ProcessResult run = run_process(
        Options{stage_binary("06-fully-sharded"), "--devices", cpus(2)} + options + types,
        kDeadline);
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring("--param-dtype bf16: rounds float32, and this build"));
    return;
  }
  const Outcome whole = train(options, "06-fully-sharded", cpus(2));
  const Outcome half = train(options + types, "06-fully-sharded", cpus(2));
  const double apart = relative_l2(half.state, whole.state);
  CHECK((apart > 1e-6 && apart < 0x1p-8));
  const nlohmann::json& bytes = half.metrics.at("bytes_per_step");
  CHECK(bytes.at("sent") == bytes.at("predicted"));
  CHECK(2 * bytes.at("sent").get<double>() ==
        whole.metrics.at("bytes_per_step").at("sent").get<double>());
  CHECK_THAT(half.out, ContainsSubstring("1.5 (W-1)/W times the padded model is"));
}

#ifndef LOCKSTEP_DOUBLE

TEST_CASE("In 16 bits the ranks end with stage 04's bits, and skip its steps, whatever they share",
          "[equivalence][sharded][sixteen]") {
  // The scale of fp16 grows after every second good step, so that gradients overflow in some. Most
  // of them overflow in one rank's shard only, and both ranks must skip the step.
  for (const Options& type : {Options{"bf16"}, Options{"fp16", "--growth-interval", "2"}}) {
    const Options options = sharded_steps({"--max-steps", "20", "--model", "seed", "--accumulate",
                                           "2", "--clip-norm", "1000", "--precision"}) +
                            type + kSgd;
    const Outcome whole = train(options, "04-ddp", cpus(2));
    for (const std::string way : {"none", "optimizer", "gradients", "parameters"}) {
      INFO(type[0] << ", " << way);
      const Outcome shared = train(options + Options{"--shard", way}, "06-fully-sharded", cpus(2));
      check_equal(shared, whole, 0);
      if (type[0] == "bf16") continue;
      CHECK(shared.metrics.at("loss_scale") == whole.metrics.at("loss_scale"));
      CHECK(!shared.metrics.at("loss_scale").at("skipped_steps").empty());
    }
  }
}

/// MiB of parameters, gradients and AdamW's state on one of W ranks, for so many of parameters.
double kept(const std::string& way, double parameters, int ranks) {
  const double shard = parameters / ranks;
  const bool values = way == "parameters", gradients = values || way == "gradients",
             state = gradients || way == "optimizer";
  return (values ? shard : parameters) + (gradients ? shard : parameters) +
         2 * (state ? shard : parameters);
}

/// MiB of activations and workspaces for 4 samples, and of the units that are whole for a moment:
/// the lesson's table. It does not depend on the number of ranks.
const std::map<std::string, double> kBeyondKept{
    {"none", 45.6}, {"optimizer", 45.6}, {"gradients", 48.3}, {"parameters", 66.9}};

TEST_CASE("A rank's peak of memory is that of the formula and one constant",
          "[equivalence][sharded][memory]") {
  const double parameters = 11'175'818 * sizeof(Real) / 1048576.0;  // of ResNet-18
  for (const std::string& way : kWays) {
    for (const int ranks : full_campaign() ? std::vector{1, 2, 4} : std::vector{2}) {
      INFO(way << ", " << ranks << " ranks");
      const Outcome run =
          measure({"--data", "synthetic:64:8", "--workers", "0", "--model", "resnet18",
                   "--batch-size", std::to_string(4 * ranks), "--max-steps", "2", "--shard", way},
                  "06-fully-sharded", cpus(ranks));
      const double predicted = kept(way, parameters, ranks) + kBeyondKept.at(way);
      for (const double peak : run.metrics.at("peak_memory_bytes")) {
        CHECK(peak / 1048576.0 == Approx(predicted).epsilon(0.05));
      }
    }
  }
}

#endif

}  // namespace
}  // namespace lockstep
