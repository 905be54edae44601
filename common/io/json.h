#pragma once
// JSON: nlohmann's library, compiled once. A header that only names a value includes
// <nlohmann/json_fwd.hpp> instead: these templates take longer to read than all of ours.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

extern template class nlohmann::basic_json<>;  // it is in json_templates.cpp

namespace lockstep {

/// The value written in `text`. Throws nlohmann::json::parse_error.
nlohmann::json parse_json(std::string_view text);

/// The same for text of unknown origin, which errors call `what`. Throws BadInput if it is no JSON,
/// or if an object has the same key twice (a parser keeps one of them). The same if values are
/// within more than `deepest` objects and arrays. Linear time.
nlohmann::json parse_strictly(std::string_view text, const std::string& what, size_t deepest);

/// Reads a number of a file. Throws BadInput, naming `what`, unless it is a whole number, written
/// as such, from `low` to `high`.
int64_t whole_number(const nlohmann::json& value, const std::string& what, int64_t low,
                     int64_t high);

/// The first `limit` bytes of `text`, always valid UTF-8 (ill-formed bytes become '?'). Whatever is
/// in a file must neither flood an error message nor garble it.
std::string clipped(std::string_view text, size_t limit = 80);
/// `text` clipped, as a JSON string, so that it stays on one line whatever it contains.
std::string in_quotes(std::string_view text);

/// Writes one JSON value and a line end, atomically; follows links. Throws EnvironmentError.
void write_json(const std::string& path, const nlohmann::json& value);

}  // namespace lockstep
