// How a network is divided: its layers into units, flat buffers into shards, and those into what
// other ranks need.

#include "06-fully-sharded/shards.h"

#include <algorithm>
#include <random>

#include "06-fully-sharded/unit.h"
#include "common/core/error.h"
#include "common/core/real.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::message_of;

// --- Shards --------------------------------------------------------------------------------------

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
  // Three parameters with a gap after the first two, cut in the middle of the second.
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

// --- Joining -------------------------------------------------------------------------------------

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

// --- Units ---------------------------------------------------------------------------------------

using Counts = std::vector<size_t>;

const std::vector<LayerSize> kLayers{{"conv1", 1000},   {"pool1", 0},      {"block1.0", 400},
                                     {"block1.1", 400}, {"gap", 0},        {"flatten", 0},
                                     {"fc", 5000},      {"log_softmax", 0}};

TEST_CASE("Units are layers, blocks, all, or as many as reach a size", "[sharded][units]") {
  CHECK(divide_into_units(kLayers, UnitSize::from("layer")) == Counts{2, 1, 3, 2});
  CHECK(divide_into_units(kLayers, UnitSize::from("block")) == Counts{2, 4, 2});
  CHECK(divide_into_units(kLayers, UnitSize::from("model")) == Counts{8});
  CHECK(divide_into_units(kLayers, {UnitSize::Kind::bytes, 1400}) == Counts{3, 5});
  CHECK(divide_into_units(kLayers, {UnitSize::Kind::bytes, 1401}) == Counts{6, 2});
  CHECK(divide_into_units(kLayers, UnitSize::from("0.000001")) ==
        divide_into_units(kLayers, UnitSize::from("layer")));
  CHECK(divide_into_units(kLayers, UnitSize::from("25")) == Counts{8});
  for (const std::string text : {"layer", "block", "model", "25", "0.5"}) {
    CHECK(UnitSize::from(text).text() == text);
  }
}

TEST_CASE("Layers without parameters belong to a unit that has some", "[sharded][units]") {
  CHECK(divide_into_units({{"flatten", 0}, {"fc1", 8}, {"relu", 0}, {"fc2", 8}},
                          UnitSize::from("layer")) == Counts{3, 1});
  CHECK(divide_into_units({{"flatten", 0}, {"relu", 0}}, UnitSize::from("layer")) == Counts{2});
  CHECK(divide_into_units(std::vector<LayerSize>(), UnitSize::from("layer")).empty());
}

TEST_CASE("What is no unit is refused in one line", "[sharded][units][faults]") {
  for (const std::string text : {"", "layers", "0", "-1", "25MB", "nan", "inf", "1e7"}) {
    INFO(text);
    CHECK_THAT(
        testing::message_of<BadInput>([&] { UnitSize::from(text); }),
        ContainsSubstring("--unit: found '" + text + "', expected layer, block, model, or MiB"));
  }
}

}  // namespace
}  // namespace lockstep
