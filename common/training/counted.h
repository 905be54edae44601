#pragma once
// A count beside the formula that it should follow.

#include <fmt/format.h>

#include <string>

namespace lockstep {

/// How far a count is from its formula: "+0.1 %". A message too many, or too few, shows here.
inline std::string beside_formula(double counted, double formula) {
  if (formula == 0) return counted == 0 ? "+0.0 %" : "from nothing";
  return fmt::format("{:+.1f} %", 100 * (counted - formula) / formula);
}

}  // namespace lockstep
