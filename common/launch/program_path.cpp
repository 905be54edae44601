#include "common/launch/program_path.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "common/core/error.h"

namespace lockstep {
namespace {

bool is_file(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

[[noreturn]] void fail_not_executable(const std::string& path) {
  fail<EnvironmentError>(
      "{}: this file is not executable; chmod +x it, or give its interpreter first: python3 {}",
      path, path);
}

std::string checked_path(const std::string& path) {
  if (std::filesystem::is_directory(path)) {
    fail<EnvironmentError>("{}: this is a folder; expected a program", path);
  }
  if (!is_file(path)) fail<EnvironmentError>("{}: no such program; check its path", path);
  if (::access(path.c_str(), X_OK) != 0) fail_not_executable(path);
  return path;
}

}  // namespace

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return checked_path(name);
  const char* variable = std::getenv("PATH");
  const std::string folders = variable != nullptr ? variable : "/usr/bin:/bin";
  std::string not_executable;
  for (size_t begin = 0; begin <= folders.size() && !name.empty();) {
    const size_t end = std::min(folders.find(':', begin), folders.size());
    const std::string folder = folders.substr(begin, end - begin);
    std::string path = (folder.empty() ? "." : folder) + "/" + name;
    if (is_file(path)) {
      if (::access(path.c_str(), X_OK) == 0) return path;
      if (not_executable.empty()) not_executable = path;
    }
    begin = end + 1;
  }
  if (!not_executable.empty()) fail_not_executable(not_executable);
  fail<EnvironmentError>("'{}': no such program in PATH; give its path, for instance ./{}", name,
                         name);
}

}  // namespace lockstep
