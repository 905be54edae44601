#pragma once
// What a rank tells `lockstep launch`, which started it: why the job ends, or that this has already
// been said. The launcher then does not report again which rank it was.

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace lockstep {

/// The environment variable that names the launcher's pipe: "DESCRIPTOR:INODE".
inline constexpr const char* kLauncherPipe = "LOCKSTEP_LAUNCHER_PIPE";

/// Its value for a pipe; "" if `fd` is none.
inline std::string launcher_pipe(int fd) {
  struct stat found;  // filled where fstat() succeeds
  const bool piped = ::fstat(fd, &found) == 0 && S_ISFIFO(found.st_mode);
  return piped ? fmt::format("{}:{}", fd, found.st_ino) : "";
}

/// Gives a line to the launcher, which prints it once, however many ranks give it; an empty line
/// means that everything has been said. False if no launcher of ours listens: the descriptor may by
/// now belong to something else, which the inode shows.
inline bool say_through_launcher(const std::string& line) {
  const char* pipe = std::getenv(kLauncherPipe);
  int fd = -1;
  if (pipe == nullptr || std::sscanf(pipe, "%d:", &fd) != 1 || launcher_pipe(fd) != pipe) {
    return false;
  }
  if (line.size() >= PIPE_BUF) return false;  // the kernel would mix it with other ranks' lines
  return ::write(fd, (line + "\n").data(), line.size() + 1) > 0;
}

}  // namespace lockstep
