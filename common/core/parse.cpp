#include "common/core/parse.h"

#include <algorithm>
#include <charconv>

#include "common/core/error.h"

namespace lockstep {

std::optional<int64_t> read_whole(std::string_view text, int64_t least, int64_t most) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  const bool fits = error == std::errc{} && stop == end && least <= value && value <= most;
  return fits ? std::optional(value) : std::nullopt;
}

int parse_whole(std::string_view text, const std::string& name, int least, int most,
                const std::string& why) {
  const auto value = read_whole(text, least, most);
  require(value.has_value(), "{}={}: expected a whole number from {} to {}{}", name, text, least,
          most, why);
  return int(*value);
}

std::string alternatives(std::span<const char* const> words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 < words.size() ? ", " : " or ";
    text += words[i];
  }
  return text;
}

size_t find_word(std::span<const char* const> words, std::string_view word,
                 const std::string& what) {
  const auto found = std::ranges::find(words, word);
  require(found != words.end(), "{}: found '{}', expected {}", what, word, alternatives(words));
  return size_t(found - words.begin());
}

}  // namespace lockstep
