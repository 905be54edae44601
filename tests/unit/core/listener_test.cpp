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
  CHECK(status_of("[#listener_test]") == 77);
  CHECK(status_of("[#listener_test],A memory counter knows*") == 0);
}

}  // namespace
}  // namespace lockstep
