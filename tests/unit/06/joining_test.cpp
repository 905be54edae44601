// Joining shards: every element comes from the shard that has it.

#include "06-fully-sharded/joining.h"

#include <algorithm>
#include <random>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::message_of;

/// Cuts [0, elements) at random places, and deals the pieces out in a random order.
std::vector<FlatRange> cut(int64_t elements, size_t pieces, std::mt19937& random) {
  std::vector<int64_t> ends{0, elements};
  while (ends.size() <= pieces) ends.push_back(int64_t(random() % uint32_t(elements + 1)));
  std::ranges::sort(ends);
  std::vector<FlatRange> cut;
  for (size_t i = 0; i < pieces; ++i) cut.push_back({ends[i], ends[i + 1] - ends[i]});
  std::ranges::shuffle(cut, random);
  return cut;
}

TEST_CASE("Pieces of any number of ranks make up those of any other", "[sharded][task-06.5]") {
  std::mt19937 random(6);
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t elements = 1 + int64_t(random() % 40);
    const std::vector<FlatRange> saved = cut(elements, 1 + random() % 6, random);
    for (const FlatRange wanted : cut(elements, 1 + random() % 6, random)) {
      // What each wanted element becomes; its own number is what it must be.
      std::vector<int64_t> joined(size_t(wanted.count), -1);
      int64_t next = 0;
      for (const Extract& extract : join_shards(saved, wanted)) {
        CHECK(extract.in_wanted == next);
        CHECK(extract.of_saved.count > 0);
        next += extract.of_saved.count;
        const FlatRange& from = saved.at(extract.saved);
        REQUIRE(extract.of_saved.first >= 0);
        REQUIRE(extract.of_saved.end() <= from.count);
        for (int64_t i = 0; i < extract.of_saved.count; ++i) {
          joined.at(size_t(extract.in_wanted + i)) = from.first + extract.of_saved.first + i;
        }
      }
      for (int64_t i = 0; i < wanted.count; ++i) CHECK(joined[size_t(i)] == wanted.first + i);
    }
  }
}

TEST_CASE("A piece within one shard is one extract, one over three is three",
          "[sharded][task-06.5]") {
  const std::vector<FlatRange> saved{{0, 4}, {4, 4}, {0, 0}, {8, 4}};
  CHECK(join_shards(saved, {5, 2}) == std::vector<Extract>{{1, {1, 2}, 0}});
  CHECK(join_shards(saved, {3, 7}) ==
        std::vector<Extract>{{0, {3, 1}, 0}, {1, {0, 4}, 1}, {3, {0, 2}, 5}});
  CHECK(join_shards(saved, {12, 0}).empty());
  CHECK(join_shards({}, {0, 0}).empty());
}

TEST_CASE("An element that is missing or there twice is named", "[sharded][task-06.5]") {
  const auto refusal = [](const std::vector<FlatRange>& saved, FlatRange wanted) {
    return message_of<BadInput>([&] { join_shards(saved, wanted); });
  };
  CHECK_THAT(refusal({{0, 4}, {5, 4}}, {2, 6}), ContainsSubstring("element 4 is in no shard"));
  CHECK_THAT(refusal({{1, 3}}, {0, 4}), ContainsSubstring("element 0 is in no shard"));
  CHECK_THAT(refusal({{0, 4}}, {2, 6}), ContainsSubstring("element 4 is in no shard"));
  CHECK_THAT(refusal({}, {7, 1}), ContainsSubstring("element 7 is in no shard"));
  CHECK_THAT(refusal({{0, 5}, {4, 4}}, {0, 8}), ContainsSubstring("element 4 is in two shards"));
  // What is not wanted may be missing.
  CHECK(join_shards({{0, 4}, {5, 4}}, {5, 2}).size() == 1);
}

}  // namespace
}  // namespace lockstep
