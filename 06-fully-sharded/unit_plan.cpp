#include "06-fully-sharded/unit_plan.h"

#include <charconv>

#include "common/core/error.h"

namespace lockstep {
namespace {

/// "block1" of "block1.0".
std::string block_of(const std::string& layer) { return layer.substr(0, layer.find('.')); }

/// Whether `next`, which has parameters, begins a unit after one of `bytes` that ends with `last`.
bool begins_unit(const PlannedLayer& last, int64_t bytes, const PlannedLayer& next, UnitSize size) {
  switch (size.kind) {
    case UnitSize::Kind::layer:
      return true;
    case UnitSize::Kind::block:
      return block_of(last.name) != block_of(next.name);
    case UnitSize::Kind::model:
      return false;
    case UnitSize::Kind::bytes:
      return bytes >= size.bytes;
  }
  return false;
}

}  // namespace

UnitSize parse_unit(const std::string& text) {
  if (text == "layer") return {UnitSize::Kind::layer};
  if (text == "block") return {UnitSize::Kind::block};
  if (text == "model") return {UnitSize::Kind::model};
  double megabytes = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, megabytes);
  require(error == std::errc() && rest == end && megabytes > 0 && megabytes <= 1e6,
          "--unit: '{}', expected layer, block, model, or MiB of parameters from above 0 to 1e6",
          text);
  return {UnitSize::Kind::bytes, int64_t(megabytes * (1 << 20))};
}

std::vector<size_t> plan_units(const std::vector<PlannedLayer>& layers, UnitSize size) {
  std::vector<size_t> units;
  int64_t bytes = 0;  // of the unit at hand
  PlannedLayer last;  // of its layers with parameters
  for (const PlannedLayer& layer : layers) {
    const bool begins = layer.bytes > 0 && bytes > 0 && begins_unit(last, bytes, layer, size);
    if (units.empty() || begins) {
      units.push_back(0);
      bytes = 0;
    }
    ++units.back();
    bytes += layer.bytes;
    if (layer.bytes > 0) last = layer;
  }
  return units;
}

}  // namespace lockstep
