#pragma once
// Files damaged at random.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/support/safetensors_support.h"

namespace lockstep::testing::io {

/// Damages files at random, but in ways that reach every rule: blind changes mostly end at the
/// first rule, so half of them get a header length that fits again.
class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  std::string mutate(std::string file) {
    for (unsigned n = 1 + below(2); n > 0 && file.size() > 8; --n) file = mutate_once(file);
    return file;
  }

 private:
  unsigned below(std::size_t n) { return static_cast<unsigned>(random_() % n); }

  std::string mutate_once(const std::string& file) {
    const std::size_t length = std::min<std::size_t>(header_length(file), file.size() - 8);
    std::string header = file.substr(8, length);
    const std::string payload = file.substr(8 + length);
    switch (below(9)) {
      case 0:
        return flip_bit(file);
      case 1:
        return overwrite_length(file);
      case 2:
        return below(2) != 0 ? file.substr(0, below(file.size())) : file + std::string(1, '\0');
      case 3:
        return file_of(flip_bit(header), payload);
      case 4:
        return file_of(header.insert(below(header.size() + 1), 1, "{}[]\",:0\xC3\0"[below(10)]),
                       payload);
      case 5:
        return file_of(header.erase(below(header.size() + 1), 1 + below(4)), payload);
      case 6:
        return file_of(swap_numbers(header), payload);
      case 7:
        return file_of(replace_value(header), payload);
      default:
        return file_of(repeat_entry(header), payload);
    }
  }

  static std::uint64_t header_length(const std::string& file) {
    std::uint64_t length = 0;
    std::memcpy(&length, file.data(), sizeof length);
    return length;
  }

  std::string flip_bit(std::string text) {
    if (!text.empty()) text[below(text.size())] ^= static_cast<char>(1U << below(8));
    return text;
  }

  std::string overwrite_length(std::string file) {
    const std::uint64_t lengths[] = {0,           1,           file.size() - 8, file.size() - 7,
                                     100'000'000, 100'000'001, 1ULL << 63,      ~0ULL};
    std::memcpy(file.data(), &lengths[below(8)], 8);
    return file;
  }

  /// Puts one number of the header, or an odd one, in the place of another.
  std::string swap_numbers(const std::string& header) {
    std::vector<std::pair<std::size_t, std::size_t>> numbers;  // position, length
    for (std::size_t at = 0; (at = header.find_first_of("0123456789", at)) != header.npos;) {
      const std::size_t end = std::min(header.find_first_not_of("0123456789", at), header.size());
      numbers.emplace_back(at, end - at);
      at = end;
    }
    if (numbers.empty()) return header;
    const auto [from, from_length] = numbers[below(numbers.size())];
    const auto [to, to_length] = numbers[below(numbers.size())];
    const char* odd[] = {"-1", "1.0", "1e3", "9223372036854775807", "18446744073709551615"};
    const std::string number = below(3) == 0 ? odd[below(5)] : header.substr(from, from_length);
    return std::string(header).replace(to, to_length, number);
  }

  /// Puts a value of another type after a colon.
  std::string replace_value(const std::string& header) {
    const std::size_t colon = header.find(':', below(header.size() + 1));
    if (colon == header.npos) return header;
    const char first = header.substr(colon + 1, 1)[0];
    const std::size_t last = header.find_first_of(first == '{'   ? "}"
                                                  : first == '[' ? "]"
                                                                 : ",}",
                                                  colon);
    const std::size_t end = std::min(last, header.size() - 1) + (first == '{' || first == '[');
    const char* values[] = {"null", "7", "\"x\"", "[]", "{}", "{\"k\":7}"};
    return header.substr(0, colon + 1) + values[below(6)] + header.substr(end);
  }

  /// Doubles the text from one comma to another: often a whole entry or field.
  std::string repeat_entry(const std::string& header) {
    const std::size_t first = header.find(',', below(header.size() + 1));
    if (first == header.npos) return header;
    const std::size_t last = header.find(",\"", first + 1 + below(60));
    const std::string part = header.substr(first, last == header.npos ? 0 : last - first);
    return std::string(header).insert(first, part);
  }

  std::mt19937 random_;
};

}  // namespace lockstep::testing::io
