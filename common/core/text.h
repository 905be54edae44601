#pragma once
// Text from outside, and text for people: all that a program writes to stdout and stderr goes
// through here.
//
// Names in it come from files, command lines and other processes. What a terminal would take for an
// order, or a reader for another text than the one that is there, is shown as \x1b. Lists in error
// lines are short, however long the original is.

#include <fmt/core.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep {

/// Length in bytes of the well-formed sequence at the start of `text` (not empty), 0 if there is
/// none.
std::size_t utf8_length(std::string_view text);

/// Index of the first byte that is not part of well-formed UTF-8, or `text.size()` if all is well.
/// Overlong forms, surrogates (U+D800 to U+DFFF) and code points above U+10FFFF are ill-formed.
std::size_t find_invalid_utf8(std::string_view text);

inline bool is_valid_utf8(std::string_view text) { return find_invalid_utf8(text) == text.size(); }

/// `text` in which each byte of a control character (but for tab and newline), of a mark that turns
/// the direction of writing or ends a line, or of nothing that is UTF-8, is its number: "\x1b[2J".
std::string printable(std::string_view text);
/// The same on one line: newlines become spaces.
std::string on_one_line(std::string_view text);

/// Writes to stdout, as fmt::print() does, what printable() makes of the text.
template <class... Args>
void print_clean(fmt::format_string<Args...> format, Args&&... args) {
  fmt::print("{}", printable(fmt::format(format, std::forward<Args>(args)...)));
}

/// Writes "warning: " and the text to stderr, on one line.
void warn(std::string_view text);

/// At most 100 bytes of a text, or `most`, on one line. Cut between characters where it is UTF-8.
std::string shortened(std::string text, size_t most = 100);

constexpr double mebibytes(std::int64_t bytes) { return double(bytes) / (1 << 20); }

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

/// Where a rank is among the others: "data 1, tensor 1"; may be empty.
using PlaceOf = std::function<std::string(int rank)>;

/// Ranks with their places: "rank 1 (data 0, tensor 1), rank 3 (data 1, tensor 1)". Without
/// `place_of` as above.
template <class Ranks>
std::string name_ranks(const Ranks& ranks, const PlaceOf& place_of) {
  if (!place_of) return name_ranks(ranks);
  std::vector<std::string> names;
  for (const int rank : ranks) {
    const std::string place = place_of(rank);
    names.push_back(place.empty() ? fmt::format("rank {}", rank)
                                  : fmt::format("rank {} ({})", rank, place));
  }
  return listed(names);
}

}  // namespace lockstep
