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

UnitSize UnitSize::from(std::string_view text) {
  if (text == "layer") return {Kind::layer};
  if (text == "block") return {Kind::block};
  if (text == "model") return {Kind::model};
  double mebibytes = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, mebibytes);
  require(error == std::errc() && rest == end && mebibytes > 0 && mebibytes <= 1e6,
          "--unit: found '{}', expected layer, block, model, or MiB of parameters from above 0 to "
          "1e6",
          text);
  return {Kind::bytes, int64_t(mebibytes * (1 << 20))};
}

std::string UnitSize::text() const {
  if (kind == Kind::bytes) return fmt::format("{}", double(bytes) / (1 << 20));
  return kind == Kind::layer ? "layer" : kind == Kind::block ? "block" : "model";
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
