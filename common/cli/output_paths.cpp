#include "common/cli/output_paths.h"

#include <unistd.h>

#include <filesystem>

#include "common/core/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

/// Whether two paths lead to the same place, be there something or not.
bool same_place(const fs::path& a, const fs::path& b) {
  std::error_code missing;
  return fs::weakly_canonical(fs::absolute(a)) == fs::weakly_canonical(fs::absolute(b)) ||
         fs::equivalent(a, b, missing);
}

}  // namespace

void require_writable(const NamedPath& file) {
  if (file.path.empty()) return;
  const fs::path target(file.path);
  const fs::path folder = target.has_parent_path() ? target.parent_path() : fs::path(".");
  require(fs::is_directory(folder) && access(folder.c_str(), W_OK) == 0,
          "{} {}: the folder {} does not exist or cannot be written; create it first", file.option,
          file.path, folder.string());
  require(!fs::exists(target) || fs::is_regular_file(target),
          "{} {}: this exists and is not a regular file; name a file", file.option, file.path);
}

void require_distinct(const std::vector<NamedPath>& paths) {
  for (size_t i = 0; i < paths.size(); ++i) {
    for (size_t j = i + 1; j < paths.size(); ++j) {
      const NamedPath &a = paths[i], &b = paths[j];
      require(a.path.empty() || b.path.empty() || !same_place(a.path, b.path),
              "{} {} and {} {}: these are the same file, and one would be written over the other; "
              "name two",
              a.option, a.path, b.option, b.path);
    }
  }
}

}  // namespace lockstep
