#include "common/core/choice.h"

#include <algorithm>

#include "common/core/error.h"

namespace lockstep {

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
