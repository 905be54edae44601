#include "common/cli/option_parser.h"

#include <CLI/CLI.hpp>

#include "common/core/error.h"

namespace lockstep {
namespace {

/// The check of a number's range. CLI::Range would let NaN pass, which compares as neither too
/// small nor too large.
template <class T>
void limit_to(CLI::Option* option, Range<T> range) {
  const Range<T> any;
  if (range.low == any.low && range.high == any.high) return;
  const std::string text = fmt::format("{} to {}", range.low, range.high);
  option->check(CLI::Validator(
      [=](const std::string& word) {
        T value;
        const bool number = CLI::detail::lexical_cast(word, value);
        return number && value >= range.low && value <= range.high
                   ? std::string()
                   : fmt::format("'{}' is not a number in the range {}", word, text);
      },
      "in " + text));
}

/// An option as words of a command line, if it was given.
void append_option(const CLI::Option& option, std::vector<std::string>& words) {
  if (option.count() == 0) return;
  const bool flag = option.get_expected_max() == 0;
  if (!flag) words.push_back(option.get_name());
  for (const std::string& value : option.results()) {
    words.push_back(flag ? option.get_name() + "=" + value : value);
  }
}

}  // namespace

OptionParser::OptionParser(const std::string& program, const std::string& summary)
    : app_(std::make_unique<CLI::App>(summary, program)) {
  app_->option_defaults()->always_capture_default();
}

OptionParser::~OptionParser() = default;

void OptionParser::add(const std::string& names, std::string& value, const std::string& help) {
  app_->add_option(names, value, help);
}
void OptionParser::add(const std::string& names, int& value, const std::string& help,
                       Range<int> range) {
  limit_to(app_->add_option(names, value, help), range);
}
void OptionParser::add(const std::string& names, int64_t& value, const std::string& help,
                       Range<int64_t> range) {
  limit_to(app_->add_option(names, value, help), range);
}
void OptionParser::add(const std::string& names, double& value, const std::string& help,
                       Range<double> range) {
  limit_to(app_->add_option(names, value, help), range);
}
void OptionParser::add(const std::string& names, std::vector<std::string>& values,
                       const std::string& help) {
  app_->add_option(names, values, help)->delimiter(',');
}
void OptionParser::add(const std::string& names, std::vector<int>& values, const std::string& help,
                       Range<int> range) {
  limit_to(app_->add_option(names, values, help)->delimiter(','), range);
}
void OptionParser::add_flag(const std::string& names, bool& value, const std::string& help) {
  app_->add_flag(names, value, help);
}

void OptionParser::check_afterwards(std::function<void()> check) {
  checks_.push_back(std::move(check));
}

bool OptionParser::parse(int argc, const char* const* argv) {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app_->help());
    return false;
  } catch (const CLI::ParseError& error) {
    fail<BadInput>("{}; --help lists all options and their defaults", error.what());
  }
  for (const auto& check : checks_) check();
  return true;
}

bool OptionParser::given(const std::string& name) const {
  const CLI::Option* option = app_->get_option_no_throw(name);
  return option != nullptr && option->count() > 0;
}

bool OptionParser::takes_value(const std::string& name) const {
  const CLI::Option* option = app_->get_option_no_throw(name);
  return option != nullptr && option->get_expected_max() > 0;
}

size_t OptionParser::size() const { return app_->get_options().size(); }

std::vector<std::string> OptionParser::words_given(size_t first) const {
  const std::vector<CLI::Option*> all = app_->get_options();
  std::vector<std::string> words;
  for (size_t i = first; i < all.size(); ++i) append_option(*all[i], words);
  return words;
}

}  // namespace lockstep
