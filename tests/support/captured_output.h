#pragma once
// What a test's own process prints.

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

namespace lockstep::testing {

/// Keeps in a file what this process prints while it exists. No assertions meanwhile: they print,
/// too.
class CapturedOutput {
 public:
  explicit CapturedOutput(const std::filesystem::path& file) : before_(::dup(STDOUT_FILENO)) {
    std::fflush(stdout);
    const int fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    ::dup2(fd, STDOUT_FILENO);
    ::close(fd);
  }
  ~CapturedOutput() {
    std::fflush(stdout);
    ::dup2(before_, STDOUT_FILENO);
    ::close(before_);
  }
  CapturedOutput(const CapturedOutput&) = delete;
  CapturedOutput& operator=(const CapturedOutput&) = delete;

 private:
  int before_;
};

}  // namespace lockstep::testing
