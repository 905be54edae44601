#include "common/core/text.h"

#include <algorithm>
#include <cstdio>

namespace lockstep {

// The rows of RFC 3629, section 4: the lead byte fixes the length and the range of the second.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  const std::size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (text.size() < length) return 0;

  const unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;   // no overlong forms
  const unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;  // no surrogates
  if (byte(1) < low || byte(1) > high) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xBF) return 0;
  }
  return length;
}

std::size_t find_invalid_utf8(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t length = utf8_length(text.substr(at));
    if (length == 0) break;
    at += length;
  }
  return at;
}

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

std::string shortened(std::string text, size_t most) {
  const auto continues = [](char c) { return (c & 0xC0) == 0x80; };
  size_t end = most;
  while (end > 0 && end < text.size() && continues(text[end])) --end;
  if (end < text.size()) text = text.substr(0, end) + "...";
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 32 || c == 127; }, '?');
  return text;
}

}  // namespace lockstep
