// A program's last word on its standard output.

#include "common/options/report.h"

#include "common/core/error.h"
#include "tests/support/captured_output.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

TEST_CASE("Output of which a part was lost is an error, though the rest arrives", "[output]") {
  const testing::TempDir folder;
  std::string said;
  {
    const testing::CapturedOutput output(folder / "output");
    const int disk = ::dup(STDOUT_FILENO), full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
    ::dup2(full, STDOUT_FILENO);
    std::fputs("lost", stdout);
    std::fflush(stdout);
    ::dup2(disk, STDOUT_FILENO);  // somebody made room
    said = testing::message_of<EnvironmentError>([] { require_printed(); });
    std::clearerr(stdout);
    ::close(disk);
    ::close(full);
  }
  CHECK(said == "stdout: an earlier write failed; what was printed is lost");
}

}  // namespace
}  // namespace lockstep
