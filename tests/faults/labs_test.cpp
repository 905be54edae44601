// Stage 05's labs: each mistake has the effect that is described, and is gone with --fixed.

#include <algorithm>

#include "tests/support/catch.h"
#include "tests/support/jobs.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

/// What a lab prints. It may leave nothing, not even in the folder for temporary files.
std::string printed_by(const Words& lab) {
  const Jobs jobs;
  const ProcessResult run = jobs.run_words(
      Words{"env", "TMPDIR=" + (jobs / "").string(), build_dir() + "/05-syncbn-checkpoint/labs"} +
      lab);
  INFO(story(run));
  CHECK(run.status == 0);
  CHECK(jobs.processes() == Words{});
  CHECK(jobs.names() == Words{});
  return run.out;
}

/// The numbers after each `head` in a text.
std::vector<double> numbers_behind(const std::string& head, const std::string& text) {
  std::vector<double> numbers;
  for (size_t at = text.find(head); at != std::string::npos; at = text.find(head, at + 1)) {
    numbers.push_back(std::stod(text.substr(at + head.size())));
  }
  return numbers;
}

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

}  // namespace
}  // namespace lockstep
