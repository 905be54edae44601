#pragma once
// Checks, before a program begins, whether it can write its files at the end.

#include <string>
#include <vector>

#include "common/system/rank.h"

namespace lockstep {

enum class Output {
  file,
  file_of_each_rank,  // every rank writes one, to path_of_rank()
  folder              // in which files come and go
};

/// A path and the option that gives it; an empty path is none.
struct NamedPath {
  std::string option, path;
  Output kind = Output::file;
};

/// Refuses an output file that cannot be written, now and not after an hour of training: throws
/// BadInput.
void require_writable(const NamedPath& file);

/// Throws BadInput, naming both options, if two paths are the same file or folder, or one is inside
/// the other, also through links. One output would be written over the other.
void require_distinct(const std::vector<NamedPath>& paths);

}  // namespace lockstep
