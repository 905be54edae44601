// Hidden cases of stage 07.

#include "tests/coursework/hidden/hidden.h"
#include "tests/coursework/stage07_test.cpp"  // NOLINT(bugprone-suspicious-include): its helpers

namespace lockstep {
namespace {

using testing::Hidden;

/// "shard=2,data=3": axes in any order, each of 1 to 3 ranks.
std::string random_mesh(Hidden& hidden) {
  std::vector<std::string> names{"data", "shard", "tensor", "pipeline"};
  std::string text;
  for (int64_t left = hidden.whole(1, 3); left > 0; --left) {
    const size_t which = hidden.whole<size_t>(0, names.size() - 1);
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", names[which], hidden.whole(1, 3));
    names.erase(names.begin() + std::ptrdiff_t(which));
  }
  return text;
}

TEST_CASE("Other meshes", "[hidden07.1]") {
  Hidden hidden("07.1");
  for (int time = 0; time < 8; ++time) {
    const std::string mesh = random_mesh(hidden);
    for (const Axis axis : {Axis::data, Axis::shard, Axis::tensor, Axis::pipeline}) {
      hidden.tell(fmt::format("{}: coordinates along {}", mesh, name_of(axis)),
                  coordinates(mesh.c_str(), axis));
    }
    Axes axes;
    for (const Axis axis : {Axis::data, Axis::shard, Axis::tensor, Axis::pipeline}) {
      if (hidden.coin()) axes.insert(axis);
    }
    hidden.tell(mesh + ": first ranks of groups", firsts(mesh.c_str(), axes));
  }
}

TEST_CASE("Averages over other meshes", "[hidden07.2]") {
  Hidden hidden("07.2");
  for (int time = 0; time < 10; ++time) {
    const std::string mesh = random_mesh(hidden);
    hidden.tell(mesh + ": averaged with rank 0", averaged_with_first(mesh.c_str()));
    const MeshShape shape = MeshShape::from(mesh);
    if (shape.size(Axis::data) == 1 && shape.size(Axis::shard) == 1) continue;
    hidden.tell(mesh + ": axes", axes_of_average(mesh.c_str()));
  }
}

TEST_CASE("Other gradients in a norm", "[hidden07.3]") {
  Hidden hidden("07.3");
  for (int time = 0; time < 10; ++time) {
    const int ranks = hidden.whole(1, 4);
    const int64_t rows = hidden.whole(1, 9) * ranks, columns = hidden.whole(1, 9);
    const bool split = ranks > 1 && hidden.coin();
    const Shape whole{rows, columns}, here{split ? rows / ranks : rows, columns};
    hidden.tell(
        fmt::format("{} of {} on {} ranks: how many count it", here.text(), whole.text(), ranks),
        counting(here, whole, ranks));
    const ShardKind kind = hidden.one_of<ShardKind>(
        {ShardKind::none, ShardKind::optimizer, ShardKind::gradients, ShardKind::parameters});
    hidden.tell(fmt::format("cut along shard ({})", name_of(kind)),
                cuts(kind, Axis::shard) ? "yes" : "no");
  }
}

/// The elements in all runs, one by one.
std::vector<int64_t> elements_of(const std::vector<FlatRange>& runs) {
  std::vector<int64_t> elements;
  for (const FlatRange& run : runs) {
    for (int64_t i = run.first; i < run.end(); ++i) elements.push_back(i);
  }
  return elements;
}

TEST_CASE("Pieces of other parts", "[hidden07.4]") {
  Hidden hidden("07.4");
  for (int time = 0; time < 10; ++time) {
    const int places = hidden.whole(1, 3), place = hidden.whole(0, places - 1);
    std::array<int64_t, 3> extents{};
    for (int64_t& extent : extents) extent = hidden.whole(2, 4);
    const size_t axis = hidden.whole<size_t>(0, 2);
    const Shape part{extents[0], extents[1], extents[2]};
    extents[axis] *= places;
    const Shape whole{extents[0], extents[1], extents[2]};
    const int64_t first = hidden.whole(0, part.elements() - 1);
    const FlatRange wanted{first, hidden.whole(1, part.elements() - first)};
    hidden.tell(fmt::format("place {} of {}, a part {} of {}, {} elements from {}", place, places,
                            part.text(), whole.text(), wanted.count, wanted.first),
                elements_of(runs_in_whole(whole, part, place, wanted)));
  }
}

}  // namespace
}  // namespace lockstep
