#include "common/app/program.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "common/app/verdict.h"
#include "common/cli/report.h"
#include "common/core/error.h"

namespace lockstep {

namespace {

/// A closed stdin, stdout or stderr would be taken for the next file or connection that is opened,
/// which would then get what is printed. What holds their places cannot be written to: that is an
/// error as before.
void hold_standard_streams() {
  int fd = 0;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::open("/dev/null", O_RDONLY);
  if (fd >= 0) ::close(fd);
}

}  // namespace

int run_program(const StageInfo& stage, int argc, const char* const* argv,
                const std::function<void(const Options&)>& train) {
  hold_standard_streams();
  report_uncaught_errors();  // instead of a catch: see there
  int status = 0;
  if (const auto line = parse_command_line(stage, argc, argv)) {
    const auto ended = [&] {
      return stage.start_ranks ? stage.start_ranks(line->options) : std::optional<int>();
    };
    if (line->baseline) {
      status = run_with_baseline(stage, *line);
    } else if (const std::optional<int> of_ranks = ended()) {
      status = *of_ranks;
    } else {
      train(line->options);
    }
  }
  if (std::fflush(stdout) != 0) fail<EnvironmentError>("stdout: {}", std::strerror(errno));
  return status;
}

}  // namespace lockstep
