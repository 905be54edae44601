#include "06-fully-sharded/shards.h"

#include <algorithm>

#include "common/core/error.h"
#include "common/nn/parameter.h"

namespace lockstep {

// [task 06.1] shards and the pieces in them
int64_t padded_length(int64_t elements, int world_size) {
  return world_size * aligned((elements + world_size - 1) / world_size);
}

FlatRange shard_of(int64_t length, int rank, int world_size) {
  const int64_t count = length / world_size;
  return {rank * count, count};
}

std::vector<Piece> pieces_in(const std::vector<FlatRange>& parameters, FlatRange shard) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int64_t first = std::max(parameters[i].first, shard.first);
    const int64_t end = std::min(parameters[i].end(), shard.end());
    if (first >= end) continue;
    pieces.push_back({.parameter = i,
                      .of_parameter = {first - parameters[i].first, end - first},
                      .in_shard = first - shard.first});
  }
  return pieces;
}
// [end 06.1]

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
