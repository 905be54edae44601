#include "common/nn/init.h"

#include <cmath>
#include <numbers>
#include <random>

#include "common/core/device.h"
#include "common/nn/state_dict.h"

namespace lockstep {
namespace {

/// 24 random bits as a number in [0, 1), as torch.rand draws floats.
double uniform(std::mt19937& generator) { return (generator() & 0xFFFFFF) / 16777216.0; }

double normal(std::mt19937& generator) {  // Box and Muller
  const double radius = std::sqrt(-2 * std::log(1 - uniform(generator)));
  return radius * std::cos(2 * std::numbers::pi * uniform(generator));
}

double first_value(const Parameter& p, Initializer initializer, std::mt19937& generator) {
  if (p.kind == ParameterKind::norm_weight) return 1;
  if (p.kind == ParameterKind::norm_bias) return 0;
  if (initializer == Initializer::normal) {
    return p.kind == ParameterKind::bias ? 0 : 0.01 * normal(generator);
  }
  const double bound = 1 / std::sqrt(static_cast<double>(p.fan_in));
  return bound * (2 * uniform(generator) - 1);
}

}  // namespace

uint32_t hash_name(std::string_view name) {
  uint32_t hash = 2166136261u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

std::vector<Real> first_values(const Parameter& p, Initializer initializer, uint64_t seed) {
  std::seed_seq seeds{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                      hash_name(p.name)};
  std::mt19937 generator(seeds);
  std::vector<Real> values(static_cast<size_t>(p.shape.elements()));
  for (Real& value : values) value = Real(first_value(p, initializer, generator));
  return values;
}

void initialize(const std::vector<Parameter*>& parameters, Initializer initializer, uint64_t seed) {
  for (const Parameter* p : parameters) {
    if (!p->value.home().device().computes()) continue;  // as large as they are, and without values
    p->value.copy_from_host(from_torch_layout(*p, first_values(*p, initializer, seed)));
  }
}

}  // namespace lockstep
