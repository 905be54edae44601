#include "common/system/followed.h"

#include <unistd.h>

#include <system_error>

namespace lockstep {

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

}  // namespace lockstep
