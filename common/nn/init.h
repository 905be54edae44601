#pragma once
// Initial values of the parameters.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/nn/parameter.h"

namespace lockstep {

/// FNV-1a: the same number for the same name on every machine.
uint32_t hash_name(std::string_view name);

enum class Initializer {
  kaiming_uniform,  // PyTorch's default: weights and biases uniform within 1/sqrt(fan_in)
  normal,           // weights normal with standard deviation 0.01, biases 0
};
constexpr auto words_of(Initializer) { return std::array{"kaiming", "normal"}; }

/// The first values of one parameter, in PyTorch's layout, as initialize() sets them.
std::vector<Real> first_values(const Parameter& p, Initializer initializer, uint64_t seed);

/// Sets every parameter; BatchNorm starts with weight 1 and bias 0 either way. Each parameter has a
/// generator of its own, seeded by `seed` and its name. A layer's initial values do not depend on
/// the layers before it or on its device. Both precisions draw the same numbers.
void initialize(const std::vector<Parameter*>& parameters, Initializer initializer, uint64_t seed);
inline void initialize(const FlatParameters& parameters, Initializer initializer, uint64_t seed) {
  initialize(parameters.parameters(), initializer, seed);
}

}  // namespace lockstep
