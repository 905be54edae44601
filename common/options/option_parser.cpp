#include "common/options/option_parser.h"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/json.h"

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

template <Number T>
void OptionParser::add(const std::string& names, T& value, const About& about, Range<T> range) {
  limit_to(described(app_->add_option(names, value, about.help), about,
                     [&value] { return OptionValue(value); }),
           range);
}

template <Number T>
void OptionParser::add(const std::string& names, std::vector<T>& values, const About& about,
                       Range<T> range) {
  limit_to(described(app_->add_option(names, values, about.help), about,
                     [&values] { return OptionValue(fmt::format("{}", fmt::join(values, ","))); })
               ->delimiter(','),
           range);
}

template void OptionParser::add(const std::string&, int&, const About&, Range<int>);
template void OptionParser::add(const std::string&, int64_t&, const About&, Range<int64_t>);
template void OptionParser::add(const std::string&, double&, const About&, Range<double>);
template void OptionParser::add(const std::string&, std::vector<int>&, const About&, Range<int>);
template void OptionParser::add(const std::string&, std::vector<double>&, const About&,
                                Range<double>);

void OptionParser::add(const std::string& names, std::string& value, const About& about) {
  refuse_no_value(*app_, described(app_->add_option(names, value, about.help), about,
                                   [&value] { return OptionValue(value); }));
}

void OptionParser::add_output(const std::string& name, std::string& path, const About& about,
                              Output kind) {
  add(name, path, about);
  const auto named = [name, &path, kind] { return NamedPath{name, path, kind}; };
  outputs_.push_back(named);
  if (kind != Output::folder) check_afterwards([named] { require_writable(named()); });
}

void OptionParser::add(const std::string& names, std::vector<std::string>& values,
                       const About& about) {
  refuse_no_value(*app_, described(app_->add_option(names, values, about.help), about, [&values] {
                           return OptionValue(fmt::format("{}", fmt::join(values, ",")));
                         })->delimiter(','));
}

std::string OptionParser::words_in(std::span<const char* const> words) {
  return fmt::format("{{{}}}", fmt::join(words, ","));
}

void OptionParser::add_texts(const std::string& names, const About& about, const Written& value) {
  const auto text = [texts = value.texts] { return fmt::format("{}", fmt::join(texts(), ",")); };
  const auto read = [read = value.read](const CLI::results_t& texts) { return read(texts), true; };
  CLI::Option* option = described(app_->add_option(names, read, about.help), about, text);
  option->type_name(value.words)->default_str(text());
  if (value.several) option->expected(CLI::detail::expected_max_vector_size)->delimiter(',');
  refuse_no_value(*app_, option);
}

void OptionParser::add(const std::string& names, bool& value, const About& about) {
  static constexpr std::array kWords{"yes", "no"};
  add_texts(names, about,
            {.words = words_in(kWords),
             .texts = [&value] { return Texts{kWords.at(value ? 0 : 1)}; },
             .read = [=, &value](
                         const Texts& texts) { value = find_word(kWords, texts[0], names) == 0; }});
}

void OptionParser::add_flag(const std::string& names, bool& value, const About& about) {
  described(app_->add_flag(names, value, about.help), about,
            [&value] { return OptionValue(value); });
}

void OptionParser::is_elsewhere(const std::string& name, const std::string& program,
                                const std::string& there) {
  refuse(name, [this, program, there](const CLI::Option& given) {
    const bool flag = given.get_expected_max() == 0;
    const std::string values = flag ? "" : fmt::format("{}", fmt::join(given.results(), ","));
    std::filesystem::path path = started_as_;
    return fmt::format("start: {}{}{}", path.replace_filename(program).lexically_normal().string(),
                       flag || !values.empty() ? " " + there : "",
                       values.empty() ? "" : " " + values);
  });
}

void OptionParser::add_former(const std::string& name, const std::string& instead) {
  refuse(name, [instead](const CLI::Option&) { return instead; });
}

/// Hides an option, which is made if there is none, and refuses it with what `instead` says to do.
void OptionParser::refuse(const std::string& name,
                          const std::function<std::string(const CLI::Option&)>& instead) {
  CLI::Option* option = app_->get_option_no_throw(name);
  if (option == nullptr) {
    const auto nothing = [](const CLI::results_t&) { return true; };
    option = app_->add_option(name, nothing)->expected(0, -1)->allow_extra_args();
  }
  option->group("");
  check_afterwards([this, option, name, instead] {
    if (option->count() == 0) return;
    fail<BadInput>("{}: {} has no such option; {}", name, app_->get_name(), instead(*option));
  });
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

std::vector<std::string> OptionParser::words_given(const std::set<std::string>& others) const {
  std::vector<std::string> words;
  for (const CLI::Option* option : app_->get_options()) {
    if (!others.contains(option->get_name())) append_option(*option, words);
  }
  return words;
}

// --- What a table is for -------------------------------------------------------------------------

nlohmann::json settings_of(const OptionTable& table, std::initializer_list<Role> roles) {
  nlohmann::json settings = nlohmann::json::object();
  for (const OptionRow& row : table) {
    if (std::ranges::find(roles, row.role) == roles.end()) continue;
    std::visit([&](const auto& value) { settings[row.setting_name] = value; }, row.setting_value);
  }
  return settings;
}

nlohmann::json reported_settings(const OptionTable& table) {
  return settings_of(table, {Role::all_runs, Role::all_ranks, Role::rounding, Role::per_rank});
}

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
