#pragma once
// The header of a safetensors file as JSON, before its content is looked at. Not for use outside
// common/io.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "common/io/json.h"

namespace lockstep::safetensors {

/// Rules 1 to 4 of parse_safetensors(): the header's text.
std::string_view header_text(std::span<const std::byte> file, const std::string& what);

/// Rule 5, first half: the header as a JSON object without duplicate keys. Linear time in its size.
nlohmann::json parse_header(std::string_view text, const std::string& what);

}  // namespace lockstep::safetensors
