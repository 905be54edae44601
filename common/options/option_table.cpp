#include "common/options/option_table.h"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {
namespace {

void append_words(const OptionRow& row, std::vector<std::string>& words) {
  if (const bool* on = std::get_if<bool>(&row.value)) {
    words.push_back(*on ? row.name : row.name + "=false");
    return;
  }
  words.push_back(row.name);
  words.push_back(
      std::visit([](const auto& value) { return fmt::format("{}", value); }, row.value));
}

}  // namespace

std::vector<std::string> words_unlike(const OptionTable& defaults, const OptionTable& table) {
  std::vector<std::string> words;
  for (const OptionRow& row : table) {
    const bool usual = std::ranges::any_of(defaults, [&](const OptionRow& other) {
      return other.name == row.name && other.value == row.value;
    });
    if (!usual) append_words(row, words);
  }
  return words;
}

}  // namespace lockstep
