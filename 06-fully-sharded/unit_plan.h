#pragma once
// Which layers are gathered, reduced and given back together.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// How large units are: "layer", "block", "model", or a number of MiB.
struct UnitSize {
  enum class Kind {
    layer,  // each layer that a Sequential runs by itself; a residual block is one
    block,  // layers of the same block: block1.0 and block1.1
    model,  // all layers
    bytes,  // as many layers as it takes to reach `bytes` of parameters
  };
  Kind kind = Kind::layer;
  int64_t bytes = 0;

  static UnitSize from(std::string_view text);  // throws BadInput
  std::string text() const;
};

/// A layer as the plan sees it.
struct PlannedLayer {
  std::string name;   // "block1.0"
  int64_t bytes = 0;  // of its parameters
};

/// How many layers each unit has, in order. Layers without parameters belong to the unit before
/// them (at the beginning: after them), so that every unit has something to share, if any layer
/// has. A function of the network alone, and so the same on all ranks.
std::vector<size_t> plan_units(const std::vector<PlannedLayer>& layers, UnitSize size);

}  // namespace lockstep
