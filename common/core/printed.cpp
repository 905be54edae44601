#include "common/core/printed.h"

#include <algorithm>

#include "common/core/utf8.h"

namespace lockstep {
namespace {

/// Whether a terminal, or a reader, would be misled by this one UTF-8 character.
bool misleads(std::string_view character) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(character[i]); };
  if (character.size() == 1) return byte(0) < 0x20 || byte(0) == 0x7F;
  if (character.size() == 2) return byte(0) == 0xC2 && byte(1) < 0xA0;  // U+0080 to U+009F
  if (character.starts_with("\xE2\x80"))
    return byte(2) >= 0xA8 && byte(2) <= 0xAE;                                     // U+2028 to 202E
  return character.starts_with("\xE2\x81") && byte(2) >= 0xA6 && byte(2) <= 0xA9;  // U+2066 to 2069
}

}  // namespace

std::string printable(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    const std::string_view character = text.substr(0, std::max<size_t>(length, 1));
    text.remove_prefix(character.size());
    if (character == "\n" || character == "\t" || (length > 0 && !misleads(character))) {
      shown += character;
      continue;
    }
    for (const char byte : character)
      shown += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
  }
  return shown;
}

std::string on_one_line(std::string_view text) {
  std::string line = printable(text);
  std::ranges::replace(line, '\n', ' ');
  return line;
}

void warn(std::string_view text) {
  std::fflush(stdout);
  fmt::print(stderr, "warning: {}\n", on_one_line(text));
}

}  // namespace lockstep
