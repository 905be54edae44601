#include "common/system/command_line.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <fstream>

namespace lockstep {
namespace {

/// A word of a command, quoted for a shell.
std::string quoted(const std::string& word) {
  const auto harmless = [](unsigned char c) {
    return std::isalnum(c) != 0 || std::strchr("_./:=,+@%-", c) != nullptr;
  };
  if (!word.empty() && std::all_of(word.begin(), word.end(), harmless)) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

}  // namespace

std::vector<std::string> own_command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

std::string typed_command_line() {
  std::vector<std::string> words = own_command_line();
  std::transform(words.begin(), words.end(), words.begin(), quoted);
  return fmt::format("{}", fmt::join(words, " "));
}

}  // namespace lockstep
