// Grades stage 07.

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "07-mesh/device_mesh.h"
#include "07-mesh/mesh_checkpointer.h"
#include "07-mesh/mesh_parallel.h"
#include "tests/coursework/hint.h"

namespace lockstep {
namespace {

// --- Coordinates and groups ----------------------------------------------------------------------

/// Of all ranks along an axis, by rank: "0 0 1 1".
std::string coordinates(const char* mesh, Axis axis) {
  const MeshShape shape = MeshShape::from(mesh);
  std::vector<int> all;
  for (int rank = 0; rank < shape.ranks(); ++rank) all.push_back(shape.coordinate(rank, axis));
  return fmt::format("{}", fmt::join(all, " "));
}

/// What first_of() says of all ranks, by rank: "0 0 2 2".
std::string firsts(const char* mesh, const Axes& axes) {
  const MeshShape shape = MeshShape::from(mesh);
  std::vector<int> all;
  for (int rank = 0; rank < shape.ranks(); ++rank) all.push_back(shape.first_of(rank, axes));
  return fmt::format("{}", fmt::join(all, " "));
}

/// The ranks for which it is the same: "0 1 | 2 3".
std::string groups(const char* mesh, const Axes& axes) {
  const MeshShape shape = MeshShape::from(mesh);
  std::vector<std::string> all;
  std::map<int, size_t> place;
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    const auto [group, is_new] = place.try_emplace(shape.first_of(rank, axes), all.size());
    if (is_new) {
      all.push_back(fmt::format("{}", rank));
    } else {
      all[group->second] += fmt::format(" {}", rank);
    }
  }
  return fmt::format("{}", fmt::join(all, " | "));
}

TEST_CASE("Coordinates are row-major", "[task07.1]") {
  {
    HINT("one axis: a rank's place along it is its number");
    CHECK(coordinates("data=4", Axis::data) == "0 1 2 3");
  }
  {
    HINT("the last axis is the nearest: its ranks follow each other, and begin again");
    CHECK(coordinates("data=2,tensor=3", Axis::tensor) == "0 1 2 0 1 2");
  }
  {
    HINT("how many ranks lie between a rank and the next one along the first axis?");
    CHECK(coordinates("data=2,tensor=3", Axis::data) == "0 0 0 1 1 1");
  }
  {
    HINT("an axis in the middle: others lie behind it, and in front of it, where it begins again");
    CHECK(coordinates("data=2,shard=3,tensor=2", Axis::shard) == "0 0 1 1 2 2 0 0 1 1 2 2");
  }
  {
    HINT("whoever asks for the mesh chooses the order of the axes: extents_ has it");
    CHECK(coordinates("tensor=2,data=3", Axis::data) == "0 1 2 0 1 2");
    CHECK(coordinates("tensor=2,data=3", Axis::tensor) == "0 0 0 1 1 1");
    CHECK(coordinates("data=2,pipeline=2", Axis::pipeline) == "0 1 0 1");
  }
  HINT("along an axis that the mesh does not name there is one place");
  CHECK(coordinates("data=2,tensor=2", Axis::shard) == "0 0 0 0");
}

TEST_CASE("A group has the ranks that differ along its axes only", "[task07.1]") {
  {
    HINT("neighbours along tensor: all their other coordinates are the same. Which ones count?");
    CHECK(groups("data=2,tensor=3", {Axis::tensor}) == "0 1 2 | 3 4 5");
  }
  {
    HINT("neighbours along data lie apart: all their other coordinates are the same");
    CHECK(groups("data=2,tensor=3", {Axis::data}) == "0 3 | 1 4 | 2 5");
  }
  {
    HINT("a group along two axes: only what lies along the third one tells groups apart");
    CHECK(groups("data=2,shard=2,tensor=2", {Axis::data, Axis::tensor}) == "0 1 4 5 | 2 3 6 7");
  }
  {
    HINT("along all axes there is one group");
    CHECK(groups("data=2,tensor=3", {Axis::data, Axis::tensor}) == "0 1 2 3 4 5");
  }
  HINT("along no axis, or one with a single place, each rank is by itself");
  CHECK(groups("data=2,tensor=2", {}) == "0 | 1 | 2 | 3");
  CHECK(groups("data=2,tensor=2", {Axis::shard}) == "0 | 1 | 2 | 3");
}

TEST_CASE("A group is named by the first of its ranks", "[task07.1]") {
  HINT(
      "ranks are told apart as they should be, but it is the number of a rank that is asked for: "
      "the one of the group with coordinate 0 along the group's axes");
  CHECK(firsts("data=2,tensor=3", {Axis::tensor}) == "0 0 0 3 3 3");
  CHECK(firsts("data=2,tensor=3", {Axis::data}) == "0 1 2 0 1 2");
  CHECK(firsts("data=2,shard=2,tensor=2", {Axis::data, Axis::tensor}) == "0 0 2 2 0 0 2 2");
  CHECK(firsts("data=2,tensor=2", {}) == "0 1 2 3");
}

// --- The axes of an average ----------------------------------------------------------------------

/// The ranks whose gradients are averaged with rank 0's: "0 2".
std::string averaged_with_first(const char* mesh) {
  const MeshShape shape = MeshShape::from(mesh);
  const AveragingAxes found = averaging_axes(shape);
  Axes axes{found.reduced};
  if (found.replicas) axes.insert(*found.replicas);
  std::vector<int> ranks;
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    if (shape.first_of(rank, axes) == 0) ranks.push_back(rank);
  }
  return fmt::format("{}", fmt::join(ranks, " "));
}

/// "shard, then data"
std::string axes_of_average(const char* mesh) {
  const AveragingAxes found = averaging_axes(MeshShape::from(mesh));
  const std::string reduced = name_of(found.reduced);
  return found.replicas ? fmt::format("{}, then {}", reduced, name_of(*found.replicas)) : reduced;
}

TEST_CASE("A gradient is averaged over the ranks with other samples", "[task07.2]") {
  {
    HINT("copies with other samples, as in stage 04: all of them");
    CHECK(averaged_with_first("data=4") == "0 1 2 3");
  }
  {
    HINT("ranks that share the weights out have other samples, too, as in stage 06");
    CHECK(averaged_with_first("shard=4") == "0 1 2 3");
  }
  {
    HINT(
        "ranks along tensor have the same samples, and parts of other gradients: an average of "
        "those means nothing");
    CHECK(averaged_with_first("tensor=4") == "0");
    CHECK(averaged_with_first("data=2,tensor=2") == "0 2");
    CHECK(averaged_with_first("shard=2,tensor=2") == "0 2");
  }
  {
    HINT("stages have the same samples, and gradients of other layers: whose would be averaged?");
    CHECK(averaged_with_first("pipeline=4") == "0");
    CHECK(averaged_with_first("data=2,pipeline=2") == "0 2");
    CHECK(averaged_with_first("pipeline=2,shard=2,tensor=2") == "0 2");
  }
  HINT(
      "shards of the same numbers, of other samples: without a second average the copies drift "
      "apart");
  CHECK(averaged_with_first("data=2,shard=2") == "0 1 2 3");
  CHECK(averaged_with_first("data=2,shard=2,tensor=2") == "0 2 4 6");
  CHECK(averaged_with_first("data=2,pipeline=2,shard=2") == "0 1 4 5");
}

TEST_CASE("Shards are made along shard, and copied along data", "[task07.2]") {
  {
    HINT("along `reduced` each rank keeps a shard: which axis is that?");
    CHECK(axes_of_average("data=2,shard=2") == "shard, then data");
    CHECK(axes_of_average("shard=2,data=2,tensor=2") == "shard, then data");
  }
  HINT("an axis of one rank: what is the message for?");
  CHECK(axes_of_average("data=2,tensor=2") == "data");
  CHECK(axes_of_average("data=2,shard=1") == "data");
  CHECK(axes_of_average("shard=2,tensor=2") == "shard");
  CHECK(axes_of_average("data=1,shard=2") == "shard");
  CHECK(axes_of_average("data=2,pipeline=2") == "data");
  CHECK_FALSE(averaging_axes(MeshShape::from("tensor=2")).replicas.has_value());
  CHECK_FALSE(averaging_axes(MeshShape::from("pipeline=2")).replicas.has_value());
}

// --- The norm ------------------------------------------------------------------------------------

bool cuts(ShardKind kind, Axis axis) { return cut_along(kind).contains(axis); }

TEST_CASE("Squares are added up where ranks have others, and nowhere else", "[task07.3]") {
  const ShardKind kind =
      GENERATE(ShardKind::none, ShardKind::optimizer, ShardKind::gradients, ShardKind::parameters);
  INFO("the ranks share out: " << name_of(kind));
  {
    HINT("ranks along tensor have other parts of the split layers: this is the norm of one part");
    CHECK(cuts(kind, Axis::tensor));
  }
  {
    HINT("stages have other layers: this is the norm of one stage's");
    CHECK(cuts(kind, Axis::pipeline));
  }
  {
    HINT("ranks along data have the same gradients by now: the norm would count them all again");
    CHECK_FALSE(cuts(kind, Axis::data));
  }
  if (kind == ShardKind::none) {
    HINT("nothing is shared out, so every rank has all gradients: they would count once for each");
    CHECK_FALSE(cuts(kind, Axis::shard));
  } else {
    HINT("this is the norm of one shard: in which ways does a rank update its shard only?");
    CHECK(cuts(kind, Axis::shard));
  }
}

/// How many of the ranks along tensor count a gradient.
int counting(const Shape& here, const Shape& whole, int ranks) {
  int counting = 0;
  for (int place = 0; place < ranks; ++place) counting += counts_in_norm(here, whole, place);
  return counting;
}

TEST_CASE("A copy counts once, a part always", "[task07.3]") {
  {
    HINT("a rank without neighbours along tensor has everything, and nobody else counts it");
    CHECK(counting({8, 6}, {8, 6}, 1) == 1);
  }
  for (const int ranks : {2, 4}) {
    {
      HINT("no rank counts a gradient that all of them have");
      CHECK(counting({8}, {8}, ranks) != 0);
    }
    {
      HINT(
          "all ranks along tensor have the same gradient of a layer that is not split, and its "
          "squares are added up: it counts once too often for each further rank");
      CHECK(counting({8}, {8}, ranks) == 1);
    }
  }
  {
    HINT("a part is on no other rank: each one counts its own");
    CHECK(counting({4, 6}, {8, 6}, 2) == 2);
  }
  HINT("a layer that is split by its inputs: its parts have fewer columns, and as many rows");
  CHECK(counting({8, 3}, {8, 6}, 2) == 2);
  CHECK(counting({8, 5, 5, 2}, {8, 5, 5, 8}, 4) == 4);
}

// --- A piece of a part ---------------------------------------------------------------------------

/// "3 at 0, 3 at 12": elements [0, 3) and [12, 15) of the whole parameter.
std::string runs(const Shape& whole, const Shape& part, int place, FlatRange wanted) {
  std::vector<std::string> texts;
  for (const FlatRange& run : runs_in_whole(whole, part, place, wanted)) {
    texts.push_back(fmt::format("{} at {}", run.count, run.first));
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

TEST_CASE("A piece of a parameter that is not split", "[task07.4]") {
  {
    HINT("here and in the whole network the elements are the same");
    CHECK(runs({4, 3}, {4, 3}, 0, {2, 5}) == "5 at 2");
  }
  HINT("ranks along tensor have copies: the place does not matter");
  CHECK(runs({4, 3}, {4, 3}, 1, {2, 5}) == "5 at 2");
}

TEST_CASE("A piece of a part that has some of the rows", "[task07.4]") {
  {
    HINT("rows that follow each other lie in memory one after another: one run is enough");
    CHECK(runs({4, 3}, {2, 3}, 0, {0, 6}) == "6 at 0");
  }
  {
    HINT("in front of this place's rows are those of the places before");
    CHECK(runs({4, 3}, {2, 3}, 1, {0, 6}) == "6 at 6");
    CHECK(runs({6}, {2}, 2, {0, 2}) == "2 at 4");
  }
  HINT("the shard has only some of the part's elements: from which one on, and how many?");
  CHECK(runs({4, 3}, {2, 3}, 1, {2, 3}) == "3 at 8");
}

TEST_CASE("A piece of a part that has some of the columns", "[task07.4]") {
  {
    HINT("a row of the part is followed, in the whole, by the other ranks' columns");
    CHECK(runs({3, 4}, {3, 2}, 0, {0, 6}) == "2 at 0, 2 at 4, 2 at 8");
  }
  {
    HINT("in each row the columns of the places before come first");
    CHECK(runs({3, 4}, {3, 2}, 1, {0, 6}) == "2 at 2, 2 at 6, 2 at 10");
  }
  {
    HINT("shards are cut without regard to rows: a piece begins and ends in the middle of one");
    CHECK(runs({3, 4}, {3, 2}, 1, {1, 4}) == "1 at 3, 2 at 6, 1 at 10");
    CHECK(runs({2, 6}, {2, 3}, 1, {1, 1}) == "1 at 4");
  }
  HINT("an extent in the middle is split: what lies behind it stays together");
  CHECK(runs({2, 4, 3}, {2, 2, 3}, 1, {0, 12}) == "6 at 6, 6 at 18");
}

TEST_CASE("The pieces of all ranks make up the parameter", "[task07.4]") {
  constexpr int kPlaces = 2, kShards = 3;
  const Shape whole = {4, 3, 2};
  for (const Shape& part : {Shape{2, 3, 2}, Shape{4, 3, 1}}) {
    std::vector<int> times(size_t(whole.elements()), 0);
    const int64_t each = part.elements() / kShards;
    for (int place = 0; place < kPlaces; ++place) {
      for (int64_t shard = 0; shard < kShards; ++shard) {
        for (const FlatRange& run : runs_in_whole(whole, part, place, {shard * each, each})) {
          for (int64_t i = run.first; i < run.end(); ++i) ++times.at(size_t(i));
        }
      }
    }
    HINT("two tensor ranks with three shards each have every element once");
    CHECK(times == std::vector<int>(size_t(whole.elements()), 1));
  }
}

}  // namespace
}  // namespace lockstep
