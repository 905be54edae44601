#pragma once
// Helpers for a process that is one rank of several: the path of its own copy of a file that every
// rank writes, and a line to `lockstep launch`, which started it.

#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace lockstep {

/// The path of a rank's own copy of a file that every rank writes: `path` itself for rank 0,
/// "PATH.rank3" for rank 3.
inline std::string path_of_rank(const std::string& path, int rank) {
  return rank == 0 ? path : fmt::format("{}.rank{}", path, rank);
}

/// The environment variable that names the launcher's pipe: "DESCRIPTOR:INODE".
inline constexpr const char* kLauncherPipe = "LOCKSTEP_LAUNCHER_PIPE";

/// The variable's value for a pipe; "" if `fd` is none.
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
