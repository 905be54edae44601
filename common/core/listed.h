#pragma once
// Lists in error lines: short, however long the original is.

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <type_traits>

namespace lockstep {

/// At most 100 bytes of a text, or `most`, on one line. Cut between characters where it is UTF-8.
inline std::string shortened(std::string text, size_t most = 100) {
  const auto continues = [](char c) { return (c & 0xC0) == 0x80; };
  size_t end = most;
  while (end > 0 && end < text.size() && continues(text[end])) --end;
  if (end < text.size()) text = text.substr(0, end) + "...";
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 32 || c == 127; }, '?');
  return text;
}

/// "1, 3", or for a long list only its beginning: "a, b, ... and 39990 more".
template <class Items>
std::string listed(const Items& items) {
  constexpr size_t kMost = 10;
  std::string text;
  size_t count = 0;
  for (const auto& item : items) {
    if (++count > kMost) continue;
    if (count > 1) text += ", ";
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(item)>>) {  // none is long
      fmt::format_to(std::back_inserter(text), "{}", item);
    } else {
      text += shortened(fmt::format("{}", item));
    }
  }
  return count > kMost ? fmt::format("{}, ... and {} more", text, count - kMost) : text;
}

/// Ranks as errors name them: "rank 2", "ranks 1, 3".
template <class Ranks>
std::string name_ranks(const Ranks& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks);
}

}  // namespace lockstep
