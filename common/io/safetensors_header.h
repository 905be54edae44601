#pragma once
// The header of a safetensors file as JSON, before its content is looked at. Not for use outside
// common/io.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "common/io/json.h"

namespace lockstep::safetensors {

/// Rules 1 to 3 of parse_safetensors(): N, from the `first` bytes of a file of `size` bytes, as
/// many of them as there are up to kTellingBytes. Throws for files of other formats, too.
std::size_t header_length(std::span<const std::byte> first, std::uint64_t size,
                          const std::string& what);

/// Rule 4: the text of the header whose bytes these are, with the 8 before it.
std::string_view header_text(std::span<const std::byte> header, const std::string& what);

/// Rule 5, first half: the header as a JSON object without duplicate keys. Linear time in its size.
nlohmann::json parse_header(std::string_view text, const std::string& what);

}  // namespace lockstep::safetensors
