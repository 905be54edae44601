#include "common/io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string>
#include <system_error>
#include <utility>

#include "common/core/error.h"

namespace lockstep {

using Bytes = std::span<const std::byte>;
namespace fs = std::filesystem;

fs::path followed(const fs::path& path) {
  constexpr int kMostLinks = 40;  // as Linux has it
  fs::path target = path;
  for (int links = 0; links < kMostLinks; ++links) {
    std::error_code none;
    const fs::path next = fs::read_symlink(target, none);
    if (none) return target;
    target = target.parent_path() / next;  // an absolute one replaces the whole
  }
  return path;
}

std::size_t longest_name(const fs::path& directory) {
  const long most = ::pathconf(directory.c_str(), _PC_NAME_MAX);
  return most > 0 ? static_cast<std::size_t>(most) : 255;
}

fs::path directory_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

namespace {

const char* advice(int code) {
  switch (code) {
    case ENOENT:
    case ENOTDIR:
      return "create the directory or give another path";
    case EACCES:
    case EPERM:
    case EROFS:
      return "give a path in a directory that you may write to";
    case EISDIR:
      return "give the path of a file";
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return "free some space or give a path on another disk";
    default:
      return "check the disk or give another path";
  }
}

[[noreturn]] void fail_save(const fs::path& path, const std::string& step, int code) {
  fail<EnvironmentError>("cannot save {}: {}: {}; {}", path.string(), step, errno_text(code),
                         advice(code));
}

/// A new file next to `target`, which takes its place or is removed again.
class TemporaryFile {
 public:
  explicit TemporaryFile(const fs::path& target) : target_(target), file_(create()) {}
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(Bytes bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::write(file_.get(), bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail_save(target_, "writing", errno);
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
  }

  void sync_and_close() {
    if (::fsync(file_.get()) != 0) fail_save(target_, "writing it to the disk", errno);
    if (!file_.close()) fail_save(target_, "closing the temporary file", errno);
  }

  void take_the_place_of_target() {
    if (std::rename(path_.c_str(), target_.c_str()) != 0) {
      fail_save(target_, "renaming the temporary file to it", errno);
    }
  }

  void remove() { ::unlink(path_.c_str()); }

 private:
  /// .NAME.PID-ATTEMPT.tmp, of whose NAME only the beginning is taken if the whole were too long.
  fs::path temporary_path(int attempt) const {
    const fs::path directory = directory_of(target_);
    const std::string ending = fmt::format(".{}-{}.tmp", ::getpid(), attempt);
    std::string name = "." + target_.filename().string();
    size_t most = std::min(name.size(), longest_name(directory) - ending.size());
    const auto within_character = [&] { return (name[most] & 0xC0) == 0x80; };  // UTF-8
    while (most > 1 && most < name.size() && within_character()) --most;
    return directory / (name.substr(0, most) + ending);
  }

  /// What replaces a file keeps its permissions, and its owner where the system allows that.
  void take_over_permissions(int fd) const {
    struct stat old = {};
    if (::lstat(target_.c_str(), &old) != 0 || !S_ISREG(old.st_mode)) return;
    if (::fchown(fd, old.st_uid, old.st_gid) != 0) errno = 0;  // then it is this user's
    ::fchmod(fd, old.st_mode & 07777);
  }

  // O_EXCL makes the name unique, even among hosts that share the directory. mkstemp would do so
  // too, but its files are unreadable for everyone else.
  int create() {
    for (int attempt = 0;; ++attempt) {
      path_ = temporary_path(attempt);
      const int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd >= 0) {
        take_over_permissions(fd);
        return fd;
      }
      if (errno != EEXIST && errno != EINTR) {
        fail_save(target_, "creating a temporary file in its directory", errno);
      }
    }
  }

  fs::path target_;
  fs::path path_;
  Descriptor file_;  // last: create() fills path_
};

/// Makes the names in the file's directory durable; false (and errno) if that fails.
bool sync_directory_of(const fs::path& file) {
  const Descriptor directory(
      ::open(directory_of(file).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return directory.is_open() && ::fsync(directory.get()) == 0;
}

}  // namespace

// O_NONBLOCK: opening a named pipe must not wait for a writer that may never come.
InputFile::InputFile(const fs::path& path)
    : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  struct stat info = {};
  if (!file_.is_open() || ::fstat(file_.get(), &info) != 0) {
    fail<BadInput>("cannot open {}: {}; give the path of a file that you may read", path.string(),
                   errno_text(errno));
  }
  require(S_ISREG(info.st_mode), "cannot read {}: found a {}, expected a regular file",
          path.string(), S_ISDIR(info.st_mode) ? "directory" : "pipe or device");
  size_ = static_cast<std::uint64_t>(info.st_size);
}

void InputFile::read(std::uint64_t at, std::span<std::byte> bytes) const {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::pread(file_.get(), bytes.data() + done, bytes.size() - done,
                              static_cast<off_t>(at + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      fail<EnvironmentError>(
          "cannot read {}: got {} of {} bytes: {}; check the disk, or that no "
          "other program is writing the file",
          path_.string(), done, bytes.size(),
          n < 0 ? errno_text(errno) : "the file became shorter meanwhile");
    }
    done += static_cast<std::size_t>(n);
  }
}

std::vector<std::byte> read_file(const fs::path& path) {
  const InputFile file(path);
  std::vector<std::byte> bytes(file.size());
  file.read(0, bytes);
  return bytes;
}

void write_file_atomically(const fs::path& path, std::span<const Bytes> pieces) {
  require(path.has_filename(), "cannot save to '{}': it names no file; add a file name",
          path.string());
  // [task 05.3] atomic save
  TemporaryFile temporary(path);
  try {
    for (const Bytes piece : pieces) temporary.write(piece);
    temporary.sync_and_close();
    temporary.take_the_place_of_target();
  } catch (...) {
    temporary.remove();  // not left to a destructor: an error may end the program without unwinding
    throw;
  }
  if (!sync_directory_of(path)) {
    fail_save(path, "making its new name durable (fsync of its directory)", errno);
  }
  // [end 05.3]
}

std::vector<fs::path> make_directory(const fs::path& directory) {
  const auto refuse = [&](const char* what, int code) {
    fail<EnvironmentError>("cannot {} the directory {}: {}; give one that you may write to", what,
                           directory.string(), errno_text(code));
  };
  std::error_code error;
  std::vector<fs::path> made;
  // The path within itself: a directory's name may end in a slash.
  for (fs::path each = fs::absolute(directory / ".").parent_path(); !fs::exists(each, error);
       each = each.parent_path()) {
    made.push_back(each);
  }
  fs::create_directories(directory, error);
  if (error) refuse("make", error.value());
  for (const fs::path& each : made) {
    if (!sync_directory_of(each)) refuse("make durable", errno);
  }
  if (::access(directory.c_str(), W_OK | X_OK) != 0) refuse("write to", errno);
  return made;
}

void remove_file(const fs::path& path) {
  if (::unlink(path.c_str()) != 0) {
    if (errno == ENOENT) return;
  } else if (sync_directory_of(path)) {
    return;
  }
  const int code = errno;
  fail<EnvironmentError>("cannot remove {}: {}; {}", path.string(), errno_text(code), advice(code));
}

}  // namespace lockstep
