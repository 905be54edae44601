#pragma once
// Replace the C library's functions in the whole program of the one source that includes this.

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "tests/support/system_calls.h"

namespace lockstep::testing {

inline bool note_fsync(int fd) {
  struct stat info = {};
  fstat(fd, &info);
  if (!S_ISDIR(info.st_mode)) {
    return note_system_call(fmt::format("fsync file of {} bytes", info.st_size), "", info.st_ino);
  }
  std::error_code none;
  const auto path = std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", fd), none);
  return note_system_call("fsync directory", path.string());
}

/// The path of a name in an open folder. A name that begins at the root or in the current folder
/// stays as it is.
inline std::filesystem::path path_in(int folder, const char* name) {
  if (folder == AT_FDCWD || *name == '/') return name;
  std::error_code none;
  return std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", folder), none) / name;
}

}  // namespace lockstep::testing

extern "C" int fsync(int fd) {
  return lockstep::testing::note_fsync(fd) ? -1 : static_cast<int>(syscall(SYS_fsync, fd));
}

extern "C" int fdatasync(int fd) {
  return lockstep::testing::note_fsync(fd) ? -1 : static_cast<int>(syscall(SYS_fdatasync, fd));
}

extern "C" int renameat(int from_folder, const char* from, int to_folder, const char* to) noexcept {
  const lockstep::testing::SystemCalls* watcher = lockstep::testing::SystemCalls::watcher();
  if (watcher != nullptr && watcher->before_rename) {
    watcher->before_rename(lockstep::testing::path_in(from_folder, from).c_str(),
                           lockstep::testing::path_in(to_folder, to).c_str());
  }
  if (lockstep::testing::note_system_call("rename")) return -1;
  return static_cast<int>(syscall(SYS_renameat2, from_folder, from, to_folder, to, 0));
}

extern "C" int rename(const char* from, const char* to) noexcept {
  return renameat(AT_FDCWD, from, AT_FDCWD, to);
}

extern "C" int unlink(const char* path) noexcept {
  if (lockstep::testing::note_system_call("unlink")) return -1;
  return unlinkat(AT_FDCWD, path, 0);
}
