#pragma once

#include <filesystem>

#include "common/io/json.h"
#include "tests/support/process.h"

namespace lockstep::testing {

/// A JSON file. Throws std::runtime_error or nlohmann::json::exception.
inline nlohmann::json read_json(const std::filesystem::path& path) {
  return parse_json(read_text(path));
}

}  // namespace lockstep::testing
