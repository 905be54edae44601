#include "06-fully-sharded/shard_plan.h"

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

}  // namespace lockstep
