#pragma once
// Enums whose values have words: what a user types, and what logs and files say.

#include <concepts>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace lockstep {

/// An enum with a word for each of its values 0, 1, ..., given beside it:
///   enum class OrderKind { loader, sampler, file };
///   constexpr auto words_of(OrderKind) { return std::array{"loader", "sampler", "file"}; }
template <class T>
concept Choice = std::is_enum_v<T> && requires(T value) {
  { words_of(value) } -> std::convertible_to<std::span<const char* const>>;
};

/// "loader, sampler or file"
std::string alternatives(std::span<const char* const> words);
/// Which of the words this is. Throws BadInput: "--order: found 'random', expected loader, ..."
size_t find_word(std::span<const char* const> words, std::string_view word,
                 const std::string& what);

template <Choice T>
std::string name_of(T value) {
  return words_of(value).at(static_cast<size_t>(value));
}

/// The value with this word. Throws BadInput, which begins with `what`.
template <Choice T>
T choice_of(std::string_view word, const std::string& what) {
  return static_cast<T>(find_word(words_of(T()), word, what));
}

}  // namespace lockstep
