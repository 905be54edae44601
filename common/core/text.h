#pragma once
// Text from outside, and text for people: all that a program writes to stdout and stderr goes
// through here.
//
// Names in it come from files, command lines and other processes. Characters that a terminal would
// obey, or that make the text look like another one, are shown as \x1b. Lists in error lines are
// short, however long the original is.

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

/// `text` with the bytes that mislead shown as numbers, "\x1b[2J". Control characters (but for tab
/// and newline), marks that turn the direction of writing or end a line, and what is not UTF-8.
std::string printable(std::string_view text);
/// The same on one line: newlines become spaces.
std::string on_one_line(std::string_view text);

/// Writes to stdout, as fmt::print() does, but first makes the text printable().
template <class... Args>
void print_clean(fmt::format_string<Args...> format, Args&&... args) {
  fmt::print("{}", printable(fmt::format(format, std::forward<Args>(args)...)));
}

/// Writes "warning: " and the text to stderr, on one line.
void warn(std::string_view text);

/// At most `most` bytes of a text, on one line. UTF-8 is cut between characters.
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

/// The place of a rank among the others: "data 1, tensor 1"; may be empty.
using PlaceOf = std::function<std::string(int rank)>;

/// A rank with its place: "rank 1 (data 0, tensor 1)", or "rank 1" where the place is empty.
inline std::string name_rank(int rank, std::string_view place) {
  return place.empty() ? fmt::format("rank {}", rank) : fmt::format("rank {} ({})", rank, place);
}

/// Ranks with their places: "rank 1 (data 0, tensor 1), rank 3 (data 1, tensor 1)". Without
/// `place_of` as above.
template <class Ranks>
std::string name_ranks(const Ranks& ranks, const PlaceOf& place_of) {
  if (!place_of) return name_ranks(ranks);
  std::vector<std::string> names;
  for (const int rank : ranks) names.push_back(name_rank(rank, place_of(rank)));
  return listed(names);
}

}  // namespace lockstep
