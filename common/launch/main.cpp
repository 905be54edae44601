// The launcher as a program: `./lockstep launch --nproc-per-node 2 PROGRAM [arguments]`.

#include <fcntl.h>
#include <unistd.h>

#include "common/cli/report.h"
#include "common/launch/launcher.h"

namespace {

/// A closed stdin, stdout or stderr would be taken for the next file that is opened.
void open_standard_streams() {
  int fd = 0;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::open("/dev/null", O_RDWR);
  if (fd >= 0) ::close(fd);
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  try {
    const auto line = lockstep::parse_launch_line(argc, argv);
    return line ? lockstep::launch(line->options, line->program) : 0;
  } catch (...) {
    return lockstep::report_current_exception();  // the ranks have been ended
  }
}
