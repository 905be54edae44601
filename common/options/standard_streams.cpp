#include "common/options/standard_streams.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "common/core/error.h"

namespace lockstep {

void hold_standard_streams() {
  int fd = 0;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::open("/dev/null", O_RDONLY);
  if (fd >= 0) ::close(fd);
}

void require_printed() {
  const char* const reason = std::fflush(stdout) != 0   ? std::strerror(errno)
                             : std::ferror(stdout) != 0 ? "an earlier write failed"
                                                        : nullptr;
  if (reason != nullptr) fail<EnvironmentError>("stdout: {}; what was printed is lost", reason);
}

}  // namespace lockstep
