#pragma once
// What the descriptions of options (add_to()) give apart from a command line.

#include <initializer_list>
#include <nlohmann/json_fwd.hpp>

#include "common/options/option_parser.h"

namespace lockstep {

/// The options of these structs with the values that they have now. Each struct describes itself to
/// a parser with add_to(); here copies are described, and no command line is parsed.
template <class... Described>
OptionTable table_of(Described... options) {
  OptionParser parser("", "");
  (options.add_to(parser), ...);
  return parser.table();
}

/// The settings of the options that have one of these roles: names and plain values.
nlohmann::json settings_of(const OptionTable& table, std::initializer_list<Role> roles);
/// Those that --metrics has: all, but where reports go.
nlohmann::json reported_settings(const OptionTable& table);

}  // namespace lockstep
