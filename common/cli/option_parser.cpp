#include "common/cli/option_parser.h"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include "common/core/error.h"
#include "common/core/printed.h"

namespace lockstep {
namespace {

/// The whole word as a decimal number, on which CLI11 does not insist: it takes 0x10 and 010 as
/// numbers in other bases, and NaN as within every range.
template <class T>
std::optional<T> decimal(std::string_view word) {
  if (word.size() > 1 && word.starts_with('+') && word[1] != '-') word.remove_prefix(1);
  T value{};
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, value);
  if (error != std::errc{} || stop != end || !std::isfinite(double(value))) return std::nullopt;
  return value;
}

/// Takes decimal numbers within the range. CLI11 turns the word into the number.
template <class T>
void limit_to(CLI::Option* option, Range<T> range) {
  const Range<T> any;
  const bool whole = std::is_integral_v<T>;
  const bool limited = range.low != any.low || range.high != any.high;
  const std::string limits =
      limited ? fmt::format("in the range {} to {}", range.low, range.high) : "";
  const std::string what =
      fmt::format("{} number{}{}", whole ? "a whole" : "a", limited ? " " : "", limits);
  option->transform(CLI::Validator(
      [=](std::string& word) {
        const std::optional<T> value = decimal<T>(word);
        if (!value || *value < range.low || *value > range.high) {
          return fmt::format("'{}' is not {}, written with decimal digits", word, what);
        }
        word = fmt::format("{}", *value);
        return std::string();
      },
      limited ? fmt::format("in {} to {}", range.low, range.high) : ""));
}

/// An empty text is what an unset shell variable leaves, and where a value is forgotten CLI11 takes
/// the next option for it: the user meant something else.
void refuse_no_value(const CLI::App& app, CLI::Option* option) {
  option->check(CLI::Validator(
      [&app](const std::string& word) -> std::string {
        if (word.empty()) return "found an empty text; give one, or leave the option out";
        if (app.get_option_no_throw(word) == nullptr) return "";
        return fmt::format("found '{}', an option, expected a value; give one in front of it",
                           word);
      },
      ""));
}

/// CLI11 takes what a flag's value begins with: "2x" for 2, and that for true.
void refuse_odd_flags(const CLI::App& app, int argc, const char* const* argv) {
  for (const std::string word : std::span(argv, size_t(argc)).subspan(1)) {
    const size_t equals = word.find('=');
    const CLI::Option* option =
        equals == word.npos ? nullptr : app.get_option_no_throw(word.substr(0, equals));
    if (option == nullptr || option->get_expected_max() > 0) continue;
    const std::string value = word.substr(equals + 1);
    require(value == "true" || value == "false",
            "{}: found '{}', expected true or false, or no value, which is true",
            word.substr(0, equals), value);
  }
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

/// "batch_size" for --batch-size: the name that files use.
std::string setting_of(std::string name) {
  name.erase(0, name.find_first_not_of('-'));
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace

OptionParser::OptionParser(const std::string& program, const std::string& summary)
    : app_(std::make_unique<CLI::App>(summary, program)) {
  app_->option_defaults()->always_capture_default();
}

OptionParser::~OptionParser() = default;

void OptionParser::begin_group(const std::string& heading) { group_ = heading; }

CLI::Option* OptionParser::described(CLI::Option* option, const About& about,
                                     const std::function<OptionValue()>& value) {
  if (!group_.empty()) option->group(group_);
  const std::string name = option->get_name();
  rows_.push_back([about, value, name] {
    return OptionRow{
        .name = name,
        .role = about.role,
        .value = value(),
        .setting_name = about.setting_name.empty() ? setting_of(name) : about.setting_name,
        .setting_value = about.setting_value ? about.setting_value() : value()};
  });
  return option;
}

template <class T>
void OptionParser::add_number(const std::string& names, T& value, const About& about,
                              Range<T> range) {
  limit_to(described(app_->add_option(names, value, about.help), about,
                     [&value] { return OptionValue(value); }),
           range);
}

template <class T>
void OptionParser::add_numbers(const std::string& names, std::vector<T>& values, const About& about,
                               Range<T> range) {
  limit_to(described(app_->add_option(names, values, about.help), about,
                     [&values] { return OptionValue(fmt::format("{}", fmt::join(values, ","))); })
               ->delimiter(','),
           range);
}

void OptionParser::add(const std::string& names, std::string& value, const About& about) {
  refuse_no_value(*app_, described(app_->add_option(names, value, about.help), about,
                                   [&value] { return OptionValue(value); }));
}
void OptionParser::add_output(const std::string& name, std::string& path, const About& about) {
  add_path({.option = name, .path = ""}, path, about);
}
void OptionParser::add_output_of_each_rank(const std::string& name, std::string& path,
                                           const About& about) {
  add_path({.option = name, .path = "", .of_each_rank = true}, path, about);
}
void OptionParser::add_output_folder(const std::string& name, std::string& path,
                                     const About& about) {
  add_path({.option = name, .path = "", .is_folder = true}, path, about);
}
void OptionParser::add_path(const NamedPath& kind, std::string& path, const About& about) {
  add(kind.option, path, about);
  const auto named = [kind, &path] {
    NamedPath output = kind;
    output.path = path;
    return output;
  };
  outputs_.push_back(named);
  if (!kind.is_folder) check_afterwards([named] { require_writable(named()); });
}
void OptionParser::add(const std::string& names, int& value, const About& about, Range<int> range) {
  add_number(names, value, about, range);
}
void OptionParser::add(const std::string& names, int64_t& value, const About& about,
                       Range<int64_t> range) {
  add_number(names, value, about, range);
}
void OptionParser::add(const std::string& names, double& value, const About& about,
                       Range<double> range) {
  add_number(names, value, about, range);
}
void OptionParser::add(const std::string& names, std::vector<std::string>& values,
                       const About& about) {
  refuse_no_value(*app_, described(app_->add_option(names, values, about.help), about, [&values] {
                           return OptionValue(fmt::format("{}", fmt::join(values, ",")));
                         })->delimiter(','));
}
void OptionParser::add(const std::string& names, std::vector<int>& values, const About& about,
                       Range<int> range) {
  add_numbers(names, values, about, range);
}
void OptionParser::add(const std::string& names, std::vector<double>& values, const About& about,
                       Range<double> range) {
  add_numbers(names, values, about, range);
}
void OptionParser::add_flag(const std::string& names, bool& value, const About& about) {
  described(app_->add_flag(names, value, about.help), about,
            [&value] { return OptionValue(value); });
}

void OptionParser::add_elsewhere(const std::string& name, const std::string& program,
                                 const std::string& there) {
  const auto nothing = [](const std::vector<std::string>&) {};
  CLI::Option* option = app_->add_option_function<std::vector<std::string>>(name, nothing);
  option->expected(0, -1)->group("");
  check_afterwards([this, option, name, program, there] {
    if (option->count() == 0) return;
    const std::vector<std::string> values = option->results();
    fail<BadInput>("{}: {} has no such option; start: {}{}{}", name, app_->get_name(),
                   std::filesystem::path(started_as_).replace_filename(program).string(),
                   values.empty() ? "" : " " + there + " ", fmt::join(values, ","));
  });
}

void OptionParser::leave_out(const std::string& name) {
  app_->remove_option(app_->get_option(name));
}

OptionTable OptionParser::table() const {
  OptionTable table;
  for (const auto& row : rows_) table.push_back(row());
  return table;
}

void OptionParser::check_afterwards(std::function<void()> check) {
  checks_.push_back(std::move(check));
}

bool OptionParser::parse(int argc, const char* const* argv) {
  started_as_ = argv[0];
  refuse_odd_flags(*app_, argc, argv);
  try {
    app_->parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    print_clean("{}", app_->help());
    return false;
  } catch (const CLI::ExtrasError&) {  // whose own text has them in the opposite order
    fail<BadInput>("Not expected: {}; --help lists all options and their defaults",
                   fmt::join(app_->remaining(), " "));
  } catch (const CLI::ParseError& error) {
    fail<BadInput>("{}; --help lists all options and their defaults", error.what());
  }
  std::vector<NamedPath> outputs;
  for (const auto& output : outputs_) outputs.push_back(output());
  require_distinct(outputs);
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
