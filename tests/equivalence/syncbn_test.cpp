// Stage 05 leads to the weights of stage 01, which normalises the whole batch.

#include <fmt/format.h>

#include "tests/equivalence/outcome.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;

/// Twenty steps of 13 samples, which no number of ranks divides, and one of a single sample: some
/// ranks have none then. Batch normalisation makes roundings grow: float32 compares the first two
/// losses.
void check_synchronised(const Options& options, const std::vector<int>& numbers_of_ranks) {
  const Options all =
      Options{"--data", "synthetic:261:10", "--workers", "0", "--batch-size", "13", "--lr",
              "0.01",   "--order",          "sampler"} +
      options;
  const Outcome single = train(all);
  REQUIRE(single.losses().size() == 21);
  for (const int ranks : numbers_of_ranks) {
    INFO(ranks << " ranks");
    const Outcome several = train(all, "05-syncbn-checkpoint", cpus(ranks));
    REQUIRE(several.losses().size() == 21);
    for (size_t step = 0; step < (kDouble ? 21 : 2); ++step) {
      CHECK(std::abs(several.losses()[step] - single.losses()[step]) <= (kDouble ? 1e-10 : 1e-4));
    }
    if (kDouble) check_equal(several, single, 1e-10);
    CHECK(samples_of(several) == Approx(samples_of(single)));
    CHECK((several.metrics.at("batch_norm").at("seconds_per_step").get<double>() > 0) ==
          (ranks > 1));
  }
}

TEST_CASE("Synchronised, any number of ranks gives the weights of one device",
          "[equivalence][syncbn][row105]") {
  check_synchronised({"--model", "seed-bn"}, {1, 2, 3, 4});
}

TEST_CASE("A synchronised ResNet-18 gives the weights of one device",
          "[equivalence][syncbn][row105]") {
  check_synchronised({"--model", "resnet18", "--width", "4"}, {2});
}

TEST_CASE("Not synchronised, ranks train another network", "[equivalence][syncbn][row99]") {
  const Options options{
      "--data", "synthetic:104:10", "--workers", "0",       "--batch-size", "13", "--lr",
      "0.01",   "--order",          "sampler",   "--model", "seed-bn"};
  const Outcome single = train(options);
  const Outcome several = train(options + Options{"--no-sync-bn"}, "05-syncbn-checkpoint", cpus(2));
  CHECK(largest(difference(several.losses(), single.losses())) >= 1e-3);
  // Each rank has its own running statistics, and all evaluate with rank 0's.
  check_evaluated_as_saved(several,
                           {"--data", "synthetic:104:10", "--workers", "0", "--model", "seed-bn"});
  // It is the network of strided parts one after another.
  const Outcome parts = train_in_parts(options, "stride:2");
  CHECK(largest(difference(several.losses(), parts.losses())) <= (kDouble ? 1e-10 : 1e-2));
}

}  // namespace
}  // namespace lockstep
