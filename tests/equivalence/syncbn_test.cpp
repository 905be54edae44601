// Stage 05 leads to the weights of stage 01, which normalises the whole batch.

#include <fmt/format.h>

#include "common/data/dataset.h"
#include "tests/equivalence/outcome.h"
#include "tests/support/data_test_files.h"

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
  check_synchronised({"--model", "seed-bn"},
                     kDouble || full_campaign() ? std::vector{1, 2, 3, 4} : std::vector{3});
}

#ifdef LOCKSTEP_DOUBLE
TEST_CASE("Synchronised, ranks give the weights of one device with AdamW",
          "[equivalence][syncbn]") {
  // A bias before a normalisation has no gradient but rounding noise: eps must be above it.
  const Options options =
      Options{"--data",  "synthetic:260:10", "--workers", "0",       "--batch-size", "13",
              "--order", "sampler",          "--model",   "seed-bn", "--eps",        "1e-3"} +
      kAdamW;
  const Outcome single = train(options);
  REQUIRE(single.losses().size() == 20);
  check_equal(train(options, "05-syncbn-checkpoint", cpus(2)), single, kApart);
}
#endif

TEST_CASE("A synchronised ResNet-18 gives the weights of one device",
          "[equivalence][syncbn][row105]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  check_synchronised({"--model", "resnet18", "--width", "4"}, {2});
}

TEST_CASE("Not synchronised, ranks train another network", "[equivalence][syncbn][row99]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
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

/// 36 samples as files; `swapped`: of each four the second and the third change places.
void write_samples(const TempDir& folder, bool swapped) {
  const Dataset all = make_synthetic(SyntheticPart::train, 36);
  Bytes images, labels;
  for (int64_t i = 0; i < 36; ++i) {
    const int64_t sample = !swapped || i % 4 == 0 || i % 4 == 3 ? i : i % 4 == 1 ? i + 1 : i - 1;
    const auto image = all.images.begin() + sample * all.image_bytes();
    images.insert(images.end(), image, image + all.image_bytes());
    labels.push_back(all.labels[size_t(sample)]);
  }
  for (const std::string part : {"train", "t10k"}) {
    write_file(folder / (part + "-images-idx3-ubyte"), idx_bytes(2051, {36, 28, 28}, images));
    write_file(folder / (part + "-labels-idx1-ubyte"), idx_bytes(2049, {36}, labels));
  }
}

/// Four ranks take samples 0 to 3 of each four. Ranks 0 and 1 normalise together, and 2 and 3: the
/// parts that the reference takes of the swapped samples, every second one.
TEST_CASE("Groups of ranks that normalise together train the network of as many parts",
          "[equivalence][syncbn]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const TempDir plain, swapped;
  write_samples(plain, false);
  write_samples(swapped, true);
  const auto options = [](const TempDir& folder) {
    return Options{"--data-dir", folder.path(), "--workers",    "0",  "--lr",    "0.01",
                   "--order",    "file",        "--batch-size", "12", "--model", "seed-bn"};
  };
  const auto grouped = [&](int ranks_of_group) {
    return train(options(plain) + Options{"--sync-bn-group", std::to_string(ranks_of_group)},
                 "05-syncbn-checkpoint", cpus(4));
  };
  const auto check = [](const Outcome& found, const Outcome& expected) {
    CHECK(largest(difference(found.losses(), expected.losses())) <= (kDouble ? 1e-10 : 1e-2));
    if (kDouble) check_equal(found, expected, 1e-10);
  };
  const Outcome pairs = grouped(2), parts = train_in_parts(options(swapped), "stride:2");
  REQUIRE(pairs.losses().size() == 3);
  check(pairs, parts);
  check(grouped(4), train(options(plain)));
  const Outcome single = grouped(1);
  check(single, train_in_parts(options(plain), "stride:4"));
  CHECK_THAT(pairs.out, Catch::Matchers::ContainsSubstring("2 layers, 2 ranks normalise together"));
  CHECK_THAT(single.out, Catch::Matchers::ContainsSubstring("each rank normalises by itself"));
  CHECK(relative_l2(pairs.state, train(options(plain)).state) > 1e-4);  // and not of the whole
}

TEST_CASE("Groups that cannot be are refused in one line", "[equivalence][syncbn][faults]") {
  const auto refusal = [](const Options& more) {
    const ProcessResult run = run_process(Options{stage_binary("05-syncbn-checkpoint"), "--devices",
                                                  cpus(4), "--data", "synthetic:64:8"} +
                                              more,
                                          kDeadline);
    CHECK(run.status == 1);
    return run.err;
  };
  CHECK_THAT(refusal({"--sync-bn-group", "3"}),
             Catch::Matchers::ContainsSubstring(
                 "--sync-bn-group: 4 ranks make no groups of 3; give a divisor of 4"));
  CHECK_THAT(refusal({"--sync-bn-group", "2", "--baseline"}),
             Catch::Matchers::ContainsSubstring("stage 01 has no groups of 2 to normalise with"));
  CHECK_THAT(refusal({"--sync-bn-group", "2", "--no-sync-bn"}),
             Catch::Matchers::ContainsSubstring("leave one of them out"));
  CHECK_THAT(refusal({"--sync-bn-group", "2", "--model", "seed"}),
             Catch::Matchers::ContainsSubstring("--model seed has no batch normalisation"));
}

}  // namespace
}  // namespace lockstep
