#include "common/io/safetensors_header.h"

#include <algorithm>

#include "common/core/error.h"
#include "common/core/utf8.h"
#include "common/io/foreign_files.h"
#include "common/io/safetensors_format.h"

namespace lockstep::safetensors {

using nlohmann::json;

std::size_t header_length(std::span<const std::byte> first, std::uint64_t size,
                          const std::string& what) {
  std::uint64_t length = 0;
  std::copy_n(first.begin(), std::min(first.size(), kLengthBytes),
              reinterpret_cast<std::byte*>(&length));
  const std::uint64_t rest = size - std::min<std::uint64_t>(size, kLengthBytes);
  // A header of 640 bytes begins like a pickle, but then an object follows.
  const bool no_object =
      first.size() > kLengthBytes &&
      std::string_view("{ \t\r\n").find(char(first[kLengthBytes])) == std::string_view::npos;
  if (no_object || length > std::min<std::uint64_t>(rest, kMaxHeader)) refuse_foreign(first, what);
  require(size >= kLengthBytes,
          "{}: found {} bytes, expected at least 8 (the length of the header); the file is "
          "truncated or not a safetensors file",
          what, size);
  require(length <= kMaxHeader,
          "{}: the header claims {} bytes, expected at most {}; probably not a safetensors file",
          what, length, kMaxHeader);
  require(length <= rest,
          "{}: the header claims {} bytes, but only {} follow; the file is truncated, get it again",
          what, length, rest);
  return length;
}

std::string_view header_text(std::span<const std::byte> header, const std::string& what) {
  const std::string_view text(reinterpret_cast<const char*>(header.data()) + kLengthBytes,
                              header.size() - kLengthBytes);
  const std::size_t invalid = find_invalid_utf8(text);
  require(invalid == text.size(),
          "{}: the header is not valid UTF-8 at its byte {} of {}; the file is damaged", what,
          invalid, text.size());
  return text;
}

json parse_header(std::string_view text, const std::string& what) {
  // The parser would skip a byte order mark.
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  require(first != text.npos && text[first] == '{',
          "{}: the header is not a JSON object: found {}, expected '{{'", what,
          first == text.npos ? "no text" : in_quotes(clipped(text.substr(first), 10)));
  return parse_strictly(text, what + ": the header", 3);  // {name: {shape: [...]}}
}

}  // namespace lockstep::safetensors
