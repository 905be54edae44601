#pragma once
// Meshes of ranks to train on.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "tests/equivalence/outcome.h"

namespace lockstep::testing {

struct Mesh {
  std::string axes;  // what --mesh takes
  int ranks = 1;
};

inline Outcome train_on_mesh(const Mesh& mesh, const Options& options) {
  return train(options + Options{"--mesh", mesh.axes}, "07-mesh", cpus(mesh.ranks));
}

/// The same weights, losses and accuracy. Not the work: along `tensor` every rank does that of
/// whole layers.
inline void check_same(const Outcome& found, const Outcome& expected, double tolerance = kApart) {
  CHECK(relative_l2(found.state, expected.state) <= tolerance);
  CHECK(largest(difference(found.losses(), expected.losses())) <= 100 * tolerance);
  CHECK(found.metrics.at("accuracy") == expected.metrics.at("accuracy"));
}

/// All ways to divide so many ranks into these axes, each of 2 ranks or more, in every order. A
/// mesh is `outer`, whose axes are given, with those inside it.
inline std::vector<Mesh> meshes_in_every_order(int ranks, const Words& axes,
                                               const Mesh& outer = {}) {
  if (ranks == 1) return {outer};
  std::vector<Mesh> all;
  for (const std::string& axis : axes) {
    for (int size = 2; size <= ranks; ++size) {
      if (ranks % size != 0) continue;
      Words inner = axes;
      std::erase(inner, axis);
      const std::string before = outer.axes.empty() ? "" : outer.axes + ",";
      const Mesh with{fmt::format("{}{}={}", before, axis, size), outer.ranks * size};
      for (const Mesh& mesh : meshes_in_every_order(ranks / size, inner, with)) all.push_back(mesh);
    }
  }
  return all;
}

/// The 55 ways to divide 1, 2, 3, 4, 6 and 8 ranks over the four axes, those of size 1 included.
/// The order of the axes changes from one to the next.
inline std::vector<Mesh> meshes_of_every_size() {
  std::vector<Mesh> all;
  Words order{"data", "pipeline", "shard", "tensor"};
  const auto add = [&](std::map<std::string, int> sizes, int ranks) {
    Words words;
    for (const std::string& axis : order) words.push_back(fmt::format("{}={}", axis, sizes[axis]));
    all.push_back({fmt::format("{}", fmt::join(words, ",")), ranks});
    std::next_permutation(order.begin(), order.end());
  };
  for (const int ranks : {1, 2, 3, 4, 6, 8}) {
    for (int a = 1; a <= ranks; ++a) {
      for (int b = 1; b <= ranks / a; ++b) {
        for (int c = 1; c <= ranks / a / b; ++c) {
          const int d = ranks / (a * b * c);
          if (a * b * c * d != ranks) continue;
          add({{"data", a}, {"shard", b}, {"tensor", c}, {"pipeline", d}}, ranks);
        }
      }
    }
  }
  return all;
}

}  // namespace lockstep::testing
