#pragma once
// A program's command line: its options, their places in memory, their ranges, and --help.
// Everything about an option is said once, where it is added (About). A table with a row for each
// option gives it to other uses: the comparison of ranks, checkpoints, --metrics.

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/core/parse.h"
#include "common/options/output_paths.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace lockstep {

/// The runs and ranks that must have the same value of an option.
enum class Role {
  all_runs,   // all ranks of a run, and the run that continues from its checkpoint
  all_ranks,  // all ranks of a run
  rounding,   // nobody; but a run that continues with another value says so: sums round differently
  per_rank,   // nobody: the business of each rank
  report,     // nobody: where reports go; the reports do not mention it
};

/// A list is one text, separated by commas.
using OptionValue = std::variant<bool, int64_t, double, std::string>;

/// A description of an option. A text alone will do: the role is then the strictest.
struct About {
  About(const char* text) : help(text) {}
  About(std::string text, Role who = Role::all_runs) : help(std::move(text)), role(who) {}
  /// For a setting that is not the option's own name and value: "sync_bn" of --no-sync-bn.
  About(std::string text, Role who, std::string name, std::function<OptionValue()> value)
      : help(std::move(text)),
        role(who),
        setting_name(std::move(name)),
        setting_value(std::move(value)) {}

  std::string help;  // for --help
  Role role = Role::all_runs;
  std::string setting_name;  // empty: as the option, "batch_size" for --batch-size
  std::function<OptionValue()> setting_value;
};

/// An option with its present value.
struct OptionRow {
  std::string name;  // "--batch-size"
  Role role;
  OptionValue value;
  // The setting that is compared and kept: "batch_size", and a value.
  std::string setting_name;
  OptionValue setting_value;
};

using OptionTable = std::vector<OptionRow>;

template <class T>
concept Number = std::same_as<T, int> || std::same_as<T, int64_t> || std::same_as<T, double>;

/// The range of a number, both ends included.
template <class T>
struct Range {
  T low = std::numeric_limits<T>::lowest();
  T high = std::numeric_limits<T>::max();
};

/// A value with a text of its own, such as "chunk:2". from() throws BadInput that names the option.
template <class T>
concept Textual = requires(const T value, const std::string text) {
  { value.text() } -> std::same_as<std::string>;
  { T::from(text) } -> std::same_as<T>;
};

/// Fills variables from a command line. The variables must outlive the parser; their values when
/// they are added are the defaults that --help shows. `names` is "--lr" or several spellings
/// ("-n,--number"). Numbers are decimal, texts are not empty.
class OptionParser {
 public:
  /// `summary` heads the help.
  OptionParser(const std::string& program, const std::string& summary);
  ~OptionParser();

  /// The options that are added from now on appear under this heading in --help.
  void begin_group(const std::string& heading);

  void add(const std::string& names, std::string& value, const About& about);
  template <Number T>
  void add(const std::string& names, T& value, const About& about, Range<T> range = {});
  /// A path to write to. Refused if it cannot be written, or if another output has the same path.
  void add_output(const std::string& name, std::string& path, const About& about,
                  Output kind = Output::file);
  /// Several values: in one word, separated by commas, or in several words.
  void add(const std::string& names, std::vector<std::string>& values, const About& about);
  template <Number T>
  void add(const std::string& names, std::vector<T>& values, const About& about,
           Range<T> range = {});
  /// An enum: one of its words, which --help lists (core/parse.h).
  template <Choice T>
  void add(const std::string& names, T& value, const About& about) {
    add_texts(names, about,
              {.words = words_in(words_of(T())),
               .texts = [&value] { return Texts{name_of(value)}; },
               .read = [=, &value](const Texts& texts) { value = choice_of<T>(texts[0], names); }});
  }
  template <Choice T>
  void add(const std::string& names, std::vector<T>& values, const About& about) {
    add_texts(names, about,
              {.words = words_in(words_of(T())),
               .texts =
                   [&values] {
                     Texts texts;
                     for (const T value : values) texts.push_back(name_of(value));
                     return texts;
                   },
               .read =
                   [=, &values](const Texts& texts) {
                     values.clear();
                     for (const std::string& text : texts) {
                       values.push_back(choice_of<T>(text, names));
                     }
                   },
               .several = true});
  }
  template <Textual T>
  void add(const std::string& names, T& value, const About& about) {
    add_texts(names, about,
              {.texts = [&value] { return Texts{value.text()}; },
               .read = [&value](const Texts& texts) { value = T::from(texts[0]); }});
  }
  /// yes or no
  void add(const std::string& names, bool& value, const About& about);
  /// No value: its presence means true, or false for a spelling after "!" ("--on,!--off").
  void add_flag(const std::string& names, bool& value, const About& about);

  /// Refuses an option that another program has instead, under the name `there`, and says the
  /// command to type. `program` is the path of that program from this program's folder. --help does
  /// not show the option. If the option was added before, it stays in the table.
  void is_elsewhere(const std::string& name, const std::string& program, const std::string& there);

  /// Refuses an option that this program had once, with any words after it. `instead` is the error,
  /// which says what to do. --help does not show the option.
  void add_former(const std::string& name, const std::string& instead);

  /// Calls `check` when a command line has been read, to refuse values that no range excludes.
  void check_afterwards(std::function<void()> check);

  /// Reads the command line. Returns false after a request for help, which has then been answered.
  /// Throws BadInput for unknown options, missing or empty values, and numbers that are malformed
  /// or out of range.
  bool parse(int argc, const char* const* argv);

  /// All options that were added, with their present values.
  OptionTable table() const;

  /// Whether there is such an option and the command line names it.
  bool given(const std::string& name) const;
  /// Whether there is such an option and the next word is its value.
  bool takes_value(const std::string& name) const;
  /// The given options without the `others`, as words of a command line.
  std::vector<std::string> words_given(const std::set<std::string>& others) const;

 private:
  using Texts = std::vector<std::string>;
  /// A value that is written as one text, or as several.
  struct Written {
    std::string words = "TEXT";    // in --help: "{sgd,adam,adamw}"
    std::function<Texts()> texts;  // of the value that it has now
    std::function<void(const Texts&)> read;
    bool several = false;
  };

  std::unique_ptr<CLI::App> app_;
  std::filesystem::path started_as_;  // argv[0]
  std::string group_;                 // empty: CLI11's default group
  std::vector<std::function<OptionRow()>> rows_;
  std::vector<std::function<void()>> checks_;
  std::vector<std::function<NamedPath()>> outputs_;

  static std::string words_in(std::span<const char* const> words);
  void add_texts(const std::string& names, const About& about, const Written& value);
  void refuse(const std::string& name,
              const std::function<std::string(const CLI::Option&)>& instead);
  CLI::Option* described(CLI::Option* option, const About& about,
                         const std::function<OptionValue()>& value);
};

/// The options of these structs with the values that they have now. Each struct describes itself to
/// a parser with add_to(); here copies are described, and no command line is parsed.
template <class... Described>
OptionTable table_of(Described... options) {
  OptionParser parser("", "");
  (options.add_to(parser), ...);
  return parser.table();
}

/// The settings of the options that have one of these roles: names and plain values.
nlohmann::json settings_of(const OptionTable& table, std::initializer_list<Role> roles);
/// The settings that --metrics has: all, except where reports go.
nlohmann::json reported_settings(const OptionTable& table);

/// The options as words of a command line, without those that have the same value in `defaults`.
std::vector<std::string> words_unlike(const OptionTable& defaults, const OptionTable& table);

}  // namespace lockstep
