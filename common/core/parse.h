#pragma once
// Values that texts from outside stand for: whole numbers, and the words of an enum.

#include <concepts>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace lockstep {

/// All of `text` as a whole number from `least` to `most`; nothing if it is no such number.
std::optional<int64_t> read_whole(std::string_view text, int64_t least, int64_t most);
/// The same, or throws BadInput: "NAME=text: expected a whole number from 0 to 1", with `why` after
/// it.
int parse_whole(std::string_view text, const std::string& name, int least, int most,
                const std::string& why = "");

/// An enum with a word for each of its values 0, 1, ..., given beside it:
///   enum class OrderKind { loader, sampler, file };
///   constexpr auto words_of(OrderKind) { return std::array{"loader", "sampler", "file"}; }
template <class T>
concept Choice = std::is_enum_v<T> && requires(T value) {
  { words_of(value) } -> std::convertible_to<std::span<const char* const>>;
};

/// "loader, sampler or file"
std::string alternatives(std::span<const char* const> words);
/// The index of `word` in `words`. Throws BadInput: "--order: found 'random', expected loader, ..."
size_t find_word(std::span<const char* const> words, std::string_view word,
                 const std::string& what);

template <Choice T>
std::string name_of(T value) {
  return words_of(value).at(static_cast<size_t>(value));
}

/// The value with this word. Throws BadInput with a text that begins with `what`.
template <Choice T>
T choice_of(std::string_view word, const std::string& what) {
  return static_cast<T>(find_word(words_of(T()), word, what));
}

}  // namespace lockstep
