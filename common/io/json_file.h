#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace lockstep {

/// Writes one JSON value and a line end, atomically, to where links lead. Throws EnvironmentError.
void write_json(const std::string& path, const nlohmann::json& value);

}  // namespace lockstep
