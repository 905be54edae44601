#include "06-fully-sharded/joining.h"

#include <algorithm>

#include "common/core/error.h"

namespace lockstep {

// [task 06.5] joining shards
std::vector<Extract> join_shards(const std::vector<FlatRange>& saved, FlatRange wanted) {
  std::vector<Extract> extracts;
  for (size_t i = 0; i < saved.size(); ++i) {
    const int64_t first = std::max(saved[i].first, wanted.first);
    const int64_t end = std::min(saved[i].end(), wanted.end());
    if (first >= end) continue;
    extracts.push_back({.saved = i,
                        .of_saved = {first - saved[i].first, end - first},
                        .in_wanted = first - wanted.first});
  }
  std::ranges::sort(extracts, {}, &Extract::in_wanted);
  int64_t next = 0;  // the first element that no extract so far has
  for (const Extract& extract : extracts) {
    require(extract.in_wanted >= next, "element {} is in two shards, expected in one",
            wanted.first + extract.in_wanted);
    require(extract.in_wanted == next, "element {} is in no shard", wanted.first + next);
    next += extract.of_saved.count;
  }
  require(next == wanted.count, "element {} is in no shard", wanted.first + next);
  return extracts;
}
// [end 06.5]

}  // namespace lockstep
