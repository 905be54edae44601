// The launcher as a program: `./lockstep launch --nproc-per-node 2 PROGRAM [arguments]`.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "common/core/error.h"
#include "common/launch/launcher.h"

namespace {

int report(std::string text, int status) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  fmt::print(stderr, "error: {}\n", text);
  return status;
}

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
  } catch (const lockstep::Error& error) {
    return report(error.what(), error.exit_status());
  } catch (const std::exception& error) {
    return report(error.what(), 1);
  }
}
