#pragma once
// A program's command line: its options, their places in memory, their ranges, and --help.
// Everything about an option is said once, where it is added; table() gives it for other uses.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "common/cli/option_table.h"
#include "common/cli/output_paths.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace lockstep {

/// The range of a number, both ends included.
template <class T>
struct Range {
  T low = std::numeric_limits<T>::lowest();
  T high = std::numeric_limits<T>::max();
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
  void add(const std::string& names, int& value, const About& about, Range<int> = {});
  void add(const std::string& names, int64_t& value, const About& about, Range<int64_t> = {});
  void add(const std::string& names, double& value, const About& about, Range<double> = {});
  /// A file, a file per rank (path_of_rank()), or a folder that will be written: refused if it
  /// cannot be written, or if another output has the same path.
  void add_output(const std::string& name, std::string& path, const About& about);
  void add_output_of_each_rank(const std::string& name, std::string& path, const About& about);
  void add_output_folder(const std::string& name, std::string& path, const About& about);
  /// Several values: in one word, separated by commas, or in several words.
  void add(const std::string& names, std::vector<std::string>& values, const About& about);
  void add(const std::string& names, std::vector<int>& values, const About& about, Range<int> = {});
  void add(const std::string& names, std::vector<double>& values, const About& about,
           Range<double> = {});
  /// No value: its presence means true, or false for a spelling after "!" ("--on,!--off").
  void add_flag(const std::string& names, bool& value, const About& about);

  /// An option that another program of the same folder has, there called `there`, with any words
  /// after it: not in --help, and refused with the command to type instead.
  void add_elsewhere(const std::string& name, const std::string& program, const std::string& there);

  /// Removes an option again that this program does not have. It stays in the table.
  void leave_out(const std::string& name);

  /// Calls `check` when a command line has been read, to refuse what a range cannot say.
  void check_afterwards(std::function<void()> check);

  /// Reads the command line. False if that was a request for help, now answered. Throws BadInput
  /// for unknown options, missing values, empty ones, and numbers that are malformed or out of
  /// range.
  bool parse(int argc, const char* const* argv);

  /// All options that were added, with their present values.
  OptionTable table() const;

  /// Whether there is such an option and the command line names it.
  bool given(const std::string& name) const;
  /// Whether there is such an option and the next word is its value.
  bool takes_value(const std::string& name) const;
  /// How many options there are so far, --help included.
  size_t size() const;
  /// The given options from number `first` on, as words of a command line.
  std::vector<std::string> words_given(size_t first) const;

 private:
  std::unique_ptr<CLI::App> app_;
  std::filesystem::path started_as_;  // argv[0]
  std::string group_;                 // empty: CLI11's default group
  std::vector<std::function<OptionRow()>> rows_;
  std::vector<std::function<void()>> checks_;
  std::vector<std::function<NamedPath()>> outputs_;

  CLI::Option* described(CLI::Option* option, const About& about,
                         const std::function<OptionValue()>& value);
  template <class T>
  void add_number(const std::string& names, T& value, const About& about, Range<T> range);
  template <class T>
  void add_numbers(const std::string& names, std::vector<T>& values, const About& about,
                   Range<T> range);
  void add_path(const NamedPath& kind, std::string& path, const About& about);
};

}  // namespace lockstep
