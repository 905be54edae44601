#pragma once
// From the shards of W ranks to those of another W. Nothing here knows of files.

#include <vector>

#include "06-fully-sharded/shard_plan.h"

namespace lockstep {

/// A part of a saved piece of a parameter, and where it goes in the piece that is wanted.
struct Extract {
  size_t saved = 0;       // which of the saved pieces
  FlatRange of_saved{};   // these of its elements, counted from its own first one
  int64_t in_wanted = 0;  // where the first of them goes, counted likewise
  friend bool operator==(const Extract&, const Extract&) = default;
};

/// What has to be read for the elements `wanted` of a parameter, of which the elements `saved[i]`
/// are in file i. The saved pieces are in any order, and some may be empty. The extracts follow
/// each other as the wanted elements do, none is empty, and none has an element that is not wanted.
/// Throws BadInput, with the first such element, where one that is wanted is in no saved piece or
/// in two.
std::vector<Extract> join_shards(const std::vector<FlatRange>& saved, FlatRange wanted);

}  // namespace lockstep
