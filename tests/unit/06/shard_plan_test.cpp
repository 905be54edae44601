// Which rank keeps which numbers.

#include "06-fully-sharded/shard_plan.h"

#include "common/core/real.h"
#include "tests/support/catch.h"

namespace lockstep {
namespace {

constexpr int64_t kLine = 64 / sizeof(Real);  // numbers of 64 bytes

TEST_CASE("Shards are equally long, aligned, and together the whole", "[sharded][shards]") {
  for (const int64_t elements : {0, 1, 15, 16, 17, 100, 1000, 21'840}) {
    for (const int world_size : {1, 2, 3, 4, 7, 64}) {
      INFO(elements << " elements, " << world_size << " ranks");
      const int64_t length = padded_length(elements, world_size);
      CHECK(length >= elements);
      CHECK(length % (world_size * kLine) == 0);
      CHECK(length - elements < world_size * kLine);  // no more padding than it takes
      int64_t end = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        const FlatRange shard = shard_of(length, rank, world_size);
        CHECK(shard.first == end);
        CHECK(shard.count == length / world_size);
        end = shard.end();
      }
      CHECK(end == length);
    }
  }
}

TEST_CASE("A parameter may lie on several ranks, and each piece says where", "[sharded][shards]") {
  // Three parameters with a gap behind the first two, cut in the middle of the second.
  const std::vector<FlatRange> parameters{{0, 10}, {16, 40}, {64, 5}};
  using Pieces = std::vector<Piece>;
  CHECK(pieces_in(parameters, {0, 48}) == Pieces{{0, {0, 10}, 0}, {1, {0, 32}, 16}});
  CHECK(pieces_in(parameters, {48, 48}) == Pieces{{1, {32, 8}, 0}, {2, {0, 5}, 16}});
  CHECK(pieces_in(parameters, {20, 4}) == Pieces{{1, {4, 4}, 0}});  // within one
  CHECK(pieces_in(parameters, {10, 6}).empty());                    // padding only
  CHECK(pieces_in(parameters, {16, 0}).empty());
}

TEST_CASE("Every element of every parameter is in exactly one shard", "[sharded][shards]") {
  const std::vector<FlatRange> parameters{{0, 250}, {256, 1}, {272, 0}, {272, 777}, {1056, 90}};
  for (const int world_size : {1, 2, 3, 5, 16}) {
    std::vector<std::vector<int>> seen;
    for (const FlatRange& p : parameters) seen.emplace_back(size_t(p.count), 0);
    const int64_t length = padded_length(1146, world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      const FlatRange shard = shard_of(length, rank, world_size);
      for (const Piece& piece : pieces_in(parameters, shard)) {
        for (int64_t i = 0; i < piece.of_parameter.count; ++i) {
          ++seen[piece.parameter][size_t(piece.of_parameter.first + i)];
        }
        // The same number, counted in the flat buffer from either side.
        CHECK(shard.first + piece.in_shard ==
              parameters[piece.parameter].first + piece.of_parameter.first);
      }
    }
    for (const std::vector<int>& times : seen) CHECK(times == std::vector<int>(times.size(), 1));
  }
}

}  // namespace
}  // namespace lockstep
