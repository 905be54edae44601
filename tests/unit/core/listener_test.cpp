// What tests tell who runs them.

#include <cstdlib>
#include <filesystem>

#include "tests/support/catch.h"
#include "tests/support/process.h"

namespace lockstep {
namespace {

TEST_CASE("A program of which every case was skipped says so by its status", "[core]") {
  if (std::getenv("LOCKSTEP_SKIPPED") != nullptr) LOCKSTEP_SKIP("no GPU: this case skips itself");
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const auto status_of = [&](const std::string& cases) {
    return testing::run_process(
               {"env", "-u", "LOCKSTEP_TEST_LOG", "LOCKSTEP_SKIPPED=1", program, "-#", cases},
               testing::kDeadline)
        .status;
  };
  CHECK(status_of("A program of which*") == 77);
  CHECK(status_of("A program of which*,A memory counter knows*") == 0);
}

TEST_CASE("The reason of a failure ends with the end of what INFO said", "[core][listener]") {
  const bool fail = std::getenv("LOCKSTEP_FAILED") != nullptr;
  INFO(std::string(1000, 'x') << "\nerror: no more paper");
  if (fail) REQUIRE(1 == 2);
  const testing::TempDir folder;
  const testing::ProcessResult run = testing::run_process(
      {"env", "LOCKSTEP_TEST_LOG=" + (folder / "log").string(), "LOCKSTEP_FAILED=1",
       std::filesystem::read_symlink("/proc/self/exe"), "The reason of a failure*"},
      testing::kDeadline);
  CHECK(run.status != 0);
  CHECK_THAT(testing::read_text(folder / "log"),
             Catch::Matchers::ContainsSubstring("1 == 2") &&
                 Catch::Matchers::ContainsSubstring("xxx\\u000aerror: no more paper\""));
}

}  // namespace
}  // namespace lockstep
