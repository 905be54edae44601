#pragma once
// Files of which every rank writes its own.

#include <fmt/format.h>

#include <string>

namespace lockstep {

/// Where a rank writes its own copy of a file that every rank writes: rank 0 to `path` itself, rank
/// 3 to "PATH.rank3".
inline std::string path_of_rank(const std::string& path, int rank) {
  return rank == 0 ? path : fmt::format("{}.rank{}", path, rank);
}

}  // namespace lockstep
