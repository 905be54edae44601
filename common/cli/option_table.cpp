#include "common/cli/option_table.h"

#include <fmt/format.h>

namespace lockstep {
namespace {

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

void append_words(const OptionRow& row, std::vector<std::string>& words) {
  std::visit(Overloaded{[&](bool on) { words.push_back(on ? row.name : row.name + "=false"); },
                        [&](const auto& value) {
                          words.push_back(row.name);
                          words.push_back(fmt::format("{}", value));
                        }},
             row.value);
}

}  // namespace

std::vector<std::string> words_unlike(const OptionTable& defaults, const OptionTable& table) {
  std::vector<std::string> words;
  for (size_t i = 0; i < table.size(); ++i) {
    if (table[i].value != defaults.at(i).value) append_words(table[i], words);
  }
  return words;
}

}  // namespace lockstep
