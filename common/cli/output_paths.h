#pragma once
// Files that a program is to write in the end: what can be said against them before it begins.

#include <string>
#include <vector>

namespace lockstep {

/// A path and the option that gives it; an empty path is none.
struct NamedPath {
  std::string option, path;
};

/// Refuses an output file now that could not be written after an hour of training: throws BadInput.
void require_writable(const NamedPath& file);

/// Refuses paths of which two are one file or folder, whatever links lead to it, since one would be
/// written over the other: throws BadInput naming both options.
void require_distinct(const std::vector<NamedPath>& paths);

}  // namespace lockstep
