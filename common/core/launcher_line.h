#pragma once
// What a rank tells `lockstep launch`, which started it: that everybody has been told why the job
// ends. The launcher then does not say once more which rank it was.

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace lockstep {

/// The environment variable that names the launcher's pipe: "DESCRIPTOR:INODE".
inline constexpr const char* kLauncherLine = "LOCKSTEP_LAUNCHER_LINE";

/// Its value for a pipe; "" if `fd` is none.
inline std::string launcher_line(int fd) {
  struct stat found;  // filled where fstat() succeeds
  const bool piped = ::fstat(fd, &found) == 0 && S_ISFIFO(found.st_mode);
  return piped ? fmt::format("{}:{}", fd, found.st_ino) : "";
}

/// Nothing where no launcher of ours listens: the descriptor may belong to something else by now,
/// which the inode tells.
inline void tell_launcher_all_is_said() {
  const char* line = std::getenv(kLauncherLine);
  int fd = -1;
  if (line == nullptr || std::sscanf(line, "%d:", &fd) != 1 || launcher_line(fd) != line) return;
  [[maybe_unused]] const ssize_t sent = ::write(fd, "!", 1);
}

}  // namespace lockstep
