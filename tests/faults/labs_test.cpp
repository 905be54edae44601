// Labs of all stages but 04, whose are in ddp_test.cpp: each mistake has the effect that is
// described, and is gone with --fixed.

#include <algorithm>
#include <array>
#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/jobs.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

/// What a lab prints, and its errors. It may leave nothing, not even in the folder for temporary
/// files.
std::string printed_by(const Words& lab, const std::string& stage = "05-syncbn-checkpoint",
                       int status = 0) {
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(
      Words{"env", "TMPDIR=" + (jobs / "").string(), build_dir() + "/" + stage + "/labs"} + lab);
  INFO(story(run));
  CHECK(run.status == status);
  CHECK(jobs.processes() == Words{});
  CHECK(jobs.names() == Words{});
  return status == 0 ? run.out : run.err;
}

/// The numbers after each `head` in a text.
std::vector<double> numbers_behind(const std::string& head, const std::string& text) {
  std::vector<double> numbers;
  for (size_t at = text.find(head); at != std::string::npos; at = text.find(head, at + 1)) {
    numbers.push_back(std::stod(text.substr(at + head.size())));
  }
  return numbers;
}

// --- Stage 01 ------------------------------------------------------------------------------------

TEST_CASE("Lab: memory that is filled again too early holds the last batch", "[faults][lab]") {
  const std::string head = "the device got the images of batch ";
  const Words lab{"batch-reused-early"};
  CHECK(numbers_behind(head, printed_by(lab, "01-single-gpu")) == std::vector<double>{4, 4, 4, 4});
  CHECK(numbers_behind(head, printed_by(lab + Words{"--fixed"}, "01-single-gpu")) ==
        std::vector<double>{1, 2, 3, 4});
}

TEST_CASE("Lab: who reads the loss of every step has the same losses, and a device that waits",
          "[faults][lab]") {
  const auto facts = [](const Words& lab) {
    const std::string text = printed_by(lab, "01-single-gpu");
    return std::array{numbers_behind("loss of the last step ", text).at(0),
                      numbers_behind("of which the device waits ", text).at(0)};
  };
  const auto [loss, waits] = facts({"loss-at-every-step"});
  CHECK(waits >= 2);  // ms: as long as the host prepares a batch
  double least = waits;
  for (int tries = 0; tries < 5 && least >= waits;
       ++tries) {  // others may keep the host from a core
    const auto [same_loss, waits_fixed] = facts({"loss-at-every-step", "--fixed"});
    CHECK(loss == same_loss);
    least = std::min(least, waits_fixed);
  }
  CHECK(least < waits);
}

// --- Stage 02 ------------------------------------------------------------------------------------

TEST_CASE("Lab: a stream that does not wait takes a gradient that is not there", "[faults][lab]") {
  const std::string head = "device 0 adds ";
  const Words lab{"missing-hand-back"};
  CHECK(numbers_behind(head, printed_by(lab, "02-dataparallel")).at(0) == 0);
  CHECK(numbers_behind(head, printed_by(lab + Words{"--fixed"}, "02-dataparallel")).at(0) == 1);
}

TEST_CASE("Lab: a replica with old weights, and a mean of means, have another gradient",
          "[faults][lab]") {
  const std::string head = "relative error of the gradient ";
  for (const std::string lab : {"stale-replica", "mean-of-means"}) {
    const std::vector<double> wrong = numbers_behind(head, printed_by({lab}, "02-dataparallel"));
    CHECK(wrong.back() > 0.1);
    CHECK(std::ranges::is_sorted(wrong));
    for (const double error : numbers_behind(head, printed_by({lab, "--fixed"}, "02-dataparallel")))
      CHECK(error < 1e-5);
  }
}

TEST_CASE("Lab: a larger batch learns as much only at a larger rate", "[faults][lab]") {
  const Words lab{"unscaled-learning-rate"};
  const auto losses = [](const Words& words) {
    return numbers_behind(": loss ", printed_by(words, "02-dataparallel"));
  };
  const std::vector<double> wrong = losses(lab), right = losses(lab + Words{"--fixed"});
  CHECK(wrong.at(0) == right.at(0));
  CHECK(wrong.at(1) > wrong[0] + 0.2);
  CHECK(right.at(1) < right[0] + 0.1);
}

// --- Stage 03 ------------------------------------------------------------------------------------

TEST_CASE("Lab: stages that both send first block each other", "[faults][lab]") {
  const Words lab{"send-before-receive"};
  CHECK_THAT(
      printed_by(lab, "03-model-split", 1),
      ContainsSubstring("deadlock, no stage can go on: stage 0 at 'send activation 1', stage 1 "
                        "at 'send gradient 0'"));
  CHECK_THAT(printed_by(lab + Words{"--fixed"}, "03-model-split"),
             ContainsSubstring("all stages end after 15 units of time; they wait for 20 % of it"));
}

TEST_CASE("Lab: an input that is overwritten changes the gradient, a second bias the output",
          "[faults][lab]") {
  const auto error = [](const Words& lab, const std::string& head) {
    return numbers_behind(head, printed_by(lab, "03-model-split")).at(0);
  };
  for (const auto& [lab, head] : {std::pair{"activations-overwritten", "error of the gradient "},
                                  std::pair{"bias-on-every-part", "error of the output "}}) {
    CHECK(error({lab}, head) > 0.03);
    CHECK(error({lab, "--fixed"}, head) < 1e-5);
  }
}

// --- Stage 05 ------------------------------------------------------------------------------------

TEST_CASE("Lab: parts that normalise themselves have another gradient, the more the smaller",
          "[faults][syncbn][lab][row99]") {
  const std::string head = "relative error of the gradient ";
  const std::vector<double> wrong = numbers_behind(head, printed_by({"plain-batch-norm"}));
  REQUIRE(wrong.size() == 4);
  CHECK(wrong.front() > 0.03);
  CHECK(std::ranges::is_sorted(wrong));
  const std::vector<double> right =
      numbers_behind(head, printed_by({"plain-batch-norm", "--fixed"}));
  REQUIRE(right.size() == 1);
  CHECK(right.front() < 1e-5);
}

TEST_CASE("Lab: averaged variances leave out what lies between the means",
          "[faults][syncbn][lab]") {
  const auto errors = [](const std::string& text) {
    std::vector<double> both = numbers_behind("variance ", text);
    for (const double error : numbers_behind("of the gradient ", text)) both.push_back(error);
    REQUIRE(both.size() == 2);
    return both;
  };
  for (const double error : errors(printed_by({"averaged-variances"}))) CHECK(error > 0.1);
  for (const double error : errors(printed_by({"averaged-variances", "--fixed"}))) {
    CHECK(error < 1e-5);
  }
}

TEST_CASE("Lab: sums of squares lose the variance where the mean is large",
          "[faults][syncbn][lab][row100]") {
  const std::string head = "relative error ";
  const std::vector<double> wrong = numbers_behind(head, printed_by({"sum-of-squares"}));
  REQUIRE(wrong.size() == 5);
  CHECK(wrong[0] < 1e-6);
  CHECK(wrong[3] > 1e-3);
  CHECK(wrong[4] > 0.5);
  const std::vector<double> right = numbers_behind(head, printed_by({"sum-of-squares", "--fixed"}));
  REQUIRE(right.size() == 5);
  for (const double error : right) CHECK(error < 1e-5);
}

TEST_CASE("Lab: where all ranks save, a reader finds a torn file, then a mixed one",
          "[faults][checkpoint][lab][row117]") {
  const std::string wrong = printed_by({"all-ranks-save"});
  CHECK_THAT(wrong, ContainsSubstring("while they write: refused: found 0 bytes after the header"));
  CHECK_THAT(wrong, ContainsSubstring("when all are done: refused: tensor \"bn1.running_mean\" "
                                      "has the checksum"));
  CHECK_THAT(printed_by({"all-ranks-save", "--fixed"}),
             ContainsSubstring("when all are done: a whole file of 18 tensors"));
}

TEST_CASE("Lab: without a barrier, ranks go on from different steps",
          "[faults][checkpoint][lab][row117][row118]") {
  CHECK_THAT(printed_by({"no-barrier"}),
             ContainsSubstring("rank 0 goes on from step 100\nrank 1 goes on from step 0\n"));
  CHECK_THAT(printed_by({"no-barrier", "--fixed"}),
             ContainsSubstring("rank 0 goes on from step 100\nrank 1 goes on from step 100\n"));
}

// --- Stage 06 ------------------------------------------------------------------------------------

const std::string kSharded = "06-fully-sharded";

TEST_CASE("Lab: shards that are not gathered leave the ranks with different parameters",
          "[faults][sharded][lab]") {
  const std::string head = "the ranks' parameters are ";
  const std::vector<double> wrong =
      numbers_behind(head, printed_by({"stale-parameters"}, kSharded));
  REQUIRE(wrong.size() == 5);
  CHECK(wrong.front() > 1e-3);
  CHECK(std::ranges::is_sorted(wrong));
  CHECK(numbers_behind(head, printed_by({"stale-parameters", "--fixed"}, kSharded)) ==
        std::vector<double>(5, 0));
}

TEST_CASE("Lab: clipped by the norm of one shard, a gradient is too long and points elsewhere",
          "[faults][sharded][lab]") {
  const auto found = [](const Words& lab) {
    const std::string text = printed_by(lab, kSharded);
    const std::vector<double> factors = numbers_behind("scales its shard by ", text);
    REQUIRE(factors.size() == 2);
    return std::array{factors[0], factors[1], numbers_behind(", and has ", text).at(0)};
  };
  const auto wrong = found({"norm-of-one-shard"}), right = found({"norm-of-one-shard", "--fixed"});
  CHECK(std::abs(wrong[0] / wrong[1] - 1) > 0.1);
  CHECK(std::abs(wrong[2] - 0.01 * std::sqrt(2)) < 0.0001);
  CHECK(right[0] == right[1]);
  CHECK(right[2] == 0.01);
}

TEST_CASE("Lab: a sum in place of an average shows with SGD, and not with AdamW",
          "[faults][sharded][lab]") {
  const std::string head = "the step of 2 ranks is ";
  const std::vector<double> wrong =
                                numbers_behind(head, printed_by({"summed-for-averaged"}, kSharded)),
                            right = numbers_behind(
                                head, printed_by({"summed-for-averaged", "--fixed"}, kSharded));
  REQUIRE(wrong.size() == 2);
  REQUIRE(right.size() == 2);
  CHECK(wrong[0] == 2);
  CHECK(std::abs(wrong[1] - 1) < 0.02);
  CHECK(right[0] == 1);
  CHECK(std::abs(right[1] - 1) < 0.02);
}

/// Without a sanitizer the numbers are wrong or, if nobody else got the memory, right.
TEST_CASE("Lab: gradients given back too early are found by AddressSanitizer",
          "[faults][sharded][lab]") {
  CHECK_THAT(printed_by({"freed-too-early", "--fixed"}, kSharded),
             ContainsSubstring("in the shard of rank 0: from 2 to 2\n"));
#if defined(__SANITIZE_ADDRESS__)
  const std::string found = printed_by({"freed-too-early"}, kSharded, 1);
  CHECK_THAT(found, ContainsSubstring("AddressSanitizer: heap-use-after-free"));
  CHECK_THAT(found, ContainsSubstring("READ of size"));
#else
  CHECK_THAT(printed_by({"freed-too-early"}, kSharded),
             ContainsSubstring("averages of 1 and 3 in the shard of rank 0: from "));
#endif
}

TEST_CASE("Lab: a rank that first makes the whole network once has all of it besides",
          "[faults][sharded][lab]") {
  const auto sizes = [](const Words& lab) {
    const std::string text = printed_by(lab, kSharded);
    return std::array{std::stod(text.substr(text.find('\n') + 1)),
                      numbers_behind("the largest unit ", text).at(0),
                      numbers_behind("rank 0 keeps ", text).at(0),
                      numbers_behind("and had ", text).at(0)};
  };
  const auto [all, unit, kept, most] = sizes({"all-initialise-in-full"});
  const auto right = sizes({"all-initialise-in-full", "--fixed"});
  CHECK(std::abs(most - (kept + unit + all)) < 0.2);
  CHECK(std::abs(right[3] - (kept + unit)) < 0.2);
  CHECK(right[2] == kept);
}

TEST_CASE("Lab: weights of bf16 lose most updates, those of float32 hardly any",
          "[faults][sixteen][lab]") {
  const auto facts = [](const Words& lab) {
    const std::string text = printed_by(lab, kSharded);
    return std::array{numbers_behind("updates without effect: ", text).at(0),
                      numbers_behind("loss of step 100: ", text).at(0)};
  };
  const auto [lost, loss] = facts({"bf16-weights"});
  const auto [lost_fixed, loss_fixed] = facts({"bf16-weights", "--fixed"});
  CHECK(lost > 50);
  CHECK(lost_fixed < 10);
  CHECK(loss_fixed < loss);
}

TEST_CASE("Lab: gradients vanish in fp16 as the loss falls, and fewer with a scale",
          "[faults][sixteen][lab]") {
  const std::string head = "gradients that vanish in fp16: ";
  const Words lab{"fp16-without-scale"};
  const auto vanished = numbers_behind(head, printed_by(lab, kSharded));
  const auto scaled = numbers_behind(head, printed_by(lab + Words{"--fixed"}, kSharded));
  REQUIRE(vanished.size() == 4);
  REQUIRE(scaled.size() == 4);
  CHECK(vanished.back() > vanished.front());
  CHECK(scaled.back() < 0.5 * vanished.back());
}

// --- Stage 07 ------------------------------------------------------------------------------------

const std::string kMeshLabs = "07-mesh";

/// What the four ranks say of their gradients: of copies, then of parts.
std::array<std::vector<double>, 2> mesh_errors(const std::string& text) {
  std::array errors{numbers_behind("relative error of the gradient ", text),
                    numbers_behind(" in copies, ", text)};
  for (const std::vector<double>& of_ranks : errors) REQUIRE(of_ranks.size() == 4);
  return errors;
}

TEST_CASE("Lab: an average over tensor ranks hurts what they have parts of, and only that",
          "[faults][mesh][lab]") {
  const auto wrong = mesh_errors(printed_by({"wrong-axis-average"}, kMeshLabs));
  for (const double error : wrong[0]) CHECK(error < 1e-5);
  for (const double error : wrong[1]) CHECK(error > 0.3);
  for (const auto& of_ranks :
       mesh_errors(printed_by({"wrong-axis-average", "--fixed"}, kMeshLabs))) {
    for (const double error : of_ranks) CHECK(error < 1e-5);
  }
}

TEST_CASE("Lab: a norm that counts copies for each tensor rank is too large, and clips too much",
          "[faults][mesh][lab]") {
  const auto found = [](const Words& lab) {
    const std::string text = printed_by(lab, kMeshLabs);
    return std::array{numbers_behind("one process: norm ", text).at(0),
                      numbers_behind("the ranks found ", text).at(0),
                      numbers_behind(", and has ", text).at(0)};
  };
  const auto [norm, wrong, clipped] = found({"norm-counted-twice"});
  CHECK(wrong > 1.1 * norm);
  CHECK(clipped < 0.009);
  const auto right = found({"norm-counted-twice", "--fixed"});
  CHECK(right[0] == norm);
  CHECK(std::abs(right[1] - norm) < 0.0002);
  CHECK(right[2] == 0.01);
}

TEST_CASE("Lab: samples by rank are the same along data, and others along tensor",
          "[faults][mesh][lab]") {
  /// The first sample of each rank, by rank.
  const auto firsts = [](const std::string& text) {
    const std::vector<double> all = numbers_behind("): samples ", text);
    REQUIRE(all.size() == 4);
    return all;
  };
  const std::string wrong = printed_by({"same-samples-twice"}, kMeshLabs);
  const std::string right = printed_by({"same-samples-twice", "--fixed"}, kMeshLabs);
  const std::vector<double> by_rank = firsts(wrong), by_coordinate = firsts(right);
  CHECK((by_rank[0] == by_rank[2] && by_rank[1] == by_rank[3] && by_rank[0] != by_rank[1]));
  CHECK((by_coordinate[0] == by_coordinate[1] && by_coordinate[2] == by_coordinate[3] &&
         by_coordinate[0] != by_coordinate[2]));
  for (const auto& of_ranks : mesh_errors(wrong)) {
    for (const double error : of_ranks) CHECK(error > 0.3);
  }
  for (const auto& of_ranks : mesh_errors(right)) {
    for (const double error : of_ranks) CHECK(error < 1e-5);
  }
}

}  // namespace
}  // namespace lockstep
