#pragma once
// Hidden cases: what a task computes from values that nobody knows beforehand. Their file includes
// the visible cases, whose helpers they use, and is in no student's tree. A hidden case asserts
// nothing: the grader runs it with the solution, too, and compares the values.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <exception>
#include <random>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "common/core/real.h"
#include "tests/coursework/witness.h"
#include "tests/support/catch.h"

namespace lockstep::testing {

class Hidden {
 public:
  explicit Hidden(std::string_view task) {
    std::seed_seq seeds(task.begin(), task.end());
    std::vector<uint32_t> words(2);
    seeds.generate(words.begin(), words.end());
    generator_.seed(hidden_seed() ^ (uint64_t{words[0]} << 32 | words[1]));
  }
  ~Hidden() {
    if (std::uncaught_exceptions() == 0) CHECK(told_ > 0);
  }
  Hidden(const Hidden&) = delete;
  Hidden& operator=(const Hidden&) = delete;

  /// A whole number from `least` to `most`; the same on every machine.
  template <class Number = int64_t>
  Number whole(std::type_identity_t<Number> least, std::type_identity_t<Number> most) {
    return least + static_cast<Number>(generator_() % static_cast<uint64_t>(most - least + 1));
  }
  bool coin() { return whole(0, 1) == 1; }
  /// A multiple of 1/8 from -8 to 8: sums of a few of them are exact.
  Real real() { return Real(whole(-64, 64)) / 8; }
  /// 1/16 to 15/16.
  Real share() { return Real(whole(1, 15)) / 16; }
  std::vector<Real> reals(int64_t count) {
    std::vector<Real> values;
    for (int64_t i = 0; i < count; ++i) values.push_back(real());
    return values;
  }
  template <class T>
  const T& one_of(const std::vector<T>& choices) {
    return choices[whole<size_t>(0, choices.size() - 1)];
  }

  void tell(const std::string& label, const std::string& value) {
    tell_value(label, value);
    ++told_;
  }
  template <class T>
  void tell(const std::string& label, const std::vector<T>& values) {
    std::vector<std::string> texts;
    for (const T& value : values) texts.push_back(text_of(value));
    tell(label, fmt::format("{}", fmt::join(texts, " ")));
  }
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  void tell(const std::string& label, T value) {
    tell(label, text_of(value));
  }

 private:
  template <class T>
  static std::string text_of(T value) {
    if constexpr (std::is_floating_point_v<T>) return fmt::format("{:.7g}", value);
    return fmt::format("{}", value);
  }
  std::mt19937_64 generator_;
  int told_ = 0;
};

}  // namespace lockstep::testing
