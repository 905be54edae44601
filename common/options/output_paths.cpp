#include "common/options/output_paths.h"

#include <unistd.h>

#include <filesystem>
#include <string_view>

#include "common/core/error.h"
#include "common/io/file.h"
#include "common/system/process.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr size_t kRankEnding = std::string_view(".rank99999").size();

/// The path without links and dots; as it is where the system cannot follow it.
fs::path resolved(const fs::path& path) {
  std::error_code error;
  const fs::path found = fs::weakly_canonical(fs::absolute(followed(path)), error);
  if (error) return path;
  return found.has_filename() ? found : found.parent_path();  // "folder/" is "folder"
}

/// Whether two paths lead to the same place, even if nothing is there.
bool same_place(const fs::path& a, const fs::path& b) {
  std::error_code missing;
  return resolved(a) == resolved(b) || fs::equivalent(a, b, missing);
}

/// Whether a file, or the one that its links lead to, lies in a folder.
bool lies_in(const fs::path& file, const fs::path& folder) {
  return same_place(fs::absolute(file).parent_path(), folder) ||
         same_place(fs::absolute(followed(file)).parent_path(), folder);
}

/// Whether `path` is what path_of_rank() makes of `file` for some rank but 0.
bool is_of_other_rank(const NamedPath& file, const std::string& path) {
  const size_t end = path.find_last_not_of("0123456789") + 1;
  if (file.kind != Output::file_of_each_rank || end == path.size()) return false;
  const std::string begin = path_of_rank("", 1), rest = path.substr(0, end) + "1";
  return rest.ends_with(begin) && same_place(file.path, rest.substr(0, rest.size() - begin.size()));
}

}  // namespace

void require_writable(const NamedPath& file) {
  if (file.path.empty()) return;
  const fs::path target = followed(file.path), folder = directory_of(target);
  std::error_code error;
  require(fs::is_directory(folder, error) && access(folder.c_str(), W_OK) == 0,
          "{} {}: the folder {} does not exist or cannot be written; create it first", file.option,
          file.path, folder.string());
  // Of a further rank's file at the end of training, too.
  const bool of_each_rank = file.kind == Output::file_of_each_rank;
  const size_t name = target.filename().string().size() + (of_each_rank ? kRankEnding : 0);
  require(name <= longest_name(folder),
          "{} {}: the name has {} bytes{}, expected at most {}; give a shorter one", file.option,
          file.path, name, of_each_rank ? ", .rankN included" : "", longest_name(folder));
  const fs::file_type found = fs::status(target, error).type();
  if (found == fs::file_type::not_found || found == fs::file_type::regular) return;
  require(found != fs::file_type::none, "{} {}: {}; name a file", file.option, file.path,
          error.message());
  fail<BadInput>("{} {}: this exists and is not a regular file; name a file", file.option,
                 file.path);
}

void require_distinct(const std::vector<NamedPath>& paths) {
  for (size_t i = 0; i < paths.size(); ++i) {
    for (size_t j = i + 1; j < paths.size(); ++j) {
      const NamedPath &a = paths[i], &b = paths[j];
      if (a.path.empty() || b.path.empty()) continue;
      for (const auto& [folder, file] : {std::pair(a, b), std::pair(b, a)}) {
        require(folder.kind != Output::folder || !lies_in(file.path, folder.path),
                "{} {} lies in {} {}, where files are written and removed; name another place",
                file.option, file.path, folder.option, folder.path);
      }
      require(!same_place(a.path, b.path),
              "{} {} and {} {}: these are the same file, and one would be written over the other; "
              "name two",
              a.option, a.path, b.option, b.path);
      require(
          !is_of_other_rank(a, b.path) && !is_of_other_rank(b, a.path),
          "{} {} and {} {}: a further rank's file would be written over the other; name another",
          a.option, a.path, b.option, b.path);
    }
  }
}

}  // namespace lockstep
