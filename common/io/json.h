#pragma once
// JSON: nlohmann's library, compiled once. A header that only names a value includes
// <nlohmann/json_fwd.hpp> instead: these templates take longer to read than all of ours.

#include <nlohmann/json.hpp>
#include <string_view>

extern template class nlohmann::basic_json<>;  // it is in json.cpp

namespace lockstep {

/// The value written in `text`. Throws nlohmann::json::parse_error.
nlohmann::json parse_json(std::string_view text);

}  // namespace lockstep
