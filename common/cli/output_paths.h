#pragma once
// Files that a program is to write in the end: what can be said against them before it begins.

#include <string>
#include <vector>

namespace lockstep {

/// A path and the option that gives it; an empty path is none.
struct NamedPath {
  std::string option, path;
  bool of_each_rank = false;  // every rank writes such a file, to path_of_rank()
  bool is_folder = false;     // in which files come and go
};

/// Where a rank writes a file that each rank has: rank 0 to `path` itself, rank 3 to "PATH.rank3".
std::string path_of_rank(const std::string& path, int rank);

/// Refuses an output file now that could not be written after an hour of training: throws BadInput.
void require_writable(const NamedPath& file);

/// Refuses paths of which two are one file or folder, or one lies in the other, whatever links lead
/// to it, since one would be written over the other: throws BadInput naming both options.
void require_distinct(const std::vector<NamedPath>& paths);

}  // namespace lockstep
