#pragma once
// A program's command line: its options, their places in memory, their ranges, and --help.

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "common/cli/output_paths.h"

namespace CLI {
class App;
}

namespace lockstep {

/// What a number may be, both ends included.
template <class T>
struct Range {
  T low = std::numeric_limits<T>::lowest();
  T high = std::numeric_limits<T>::max();
};

/// Fills variables from a command line. They must outlive it; what they hold when they are added is
/// the default that --help shows. `names` is "--lr" or several spellings ("-n,--number"). Numbers
/// are decimal, texts are not empty.
class OptionParser {
 public:
  /// `summary` heads the help.
  OptionParser(const std::string& program, const std::string& summary);
  ~OptionParser();

  void add(const std::string& names, std::string& value, const std::string& help);
  void add(const std::string& names, int& value, const std::string& help, Range<int> = {});
  void add(const std::string& names, int64_t& value, const std::string& help, Range<int64_t> = {});
  void add(const std::string& names, double& value, const std::string& help, Range<double> = {});
  /// A file, a file of each rank (path_of_rank()), or a folder, that will be written: refused if
  /// that could not be done, or where another output is the same.
  void add_output(const std::string& name, std::string& path, const std::string& help);
  void add_output_of_each_rank(const std::string& name, std::string& path, const std::string& help);
  void add_output_folder(const std::string& name, std::string& path, const std::string& help);
  /// Values in one word with commas between them, or in several words.
  void add(const std::string& names, std::vector<std::string>& values, const std::string& help);
  void add(const std::string& names, std::vector<int>& values, const std::string& help,
           Range<int> = {});
  /// No value: being there means true, or false for a spelling after "!" ("--on,!--off").
  void add_flag(const std::string& names, bool& value, const std::string& help);

  /// An option of another program, or an old one, followed by any words: not in --help, and refused
  /// with `where` to look ("the program reference ... takes batches in parts").
  void add_elsewhere(const std::string& name, const std::string& where);

  /// Calls `check` when a command line has been read, to refuse what a range cannot say.
  void check_afterwards(std::function<void()> check);

  /// Reads the command line. False if that was a request for help, now answered. Throws BadInput
  /// for unknown options, missing values, empty ones, and numbers that are none or out of range.
  bool parse(int argc, const char* const* argv);

  /// Whether there is such an option and the command line names it.
  bool given(const std::string& name) const;
  /// Whether there is such an option and its value is the next word.
  bool takes_value(const std::string& name) const;
  /// How many options there are so far, --help included.
  size_t size() const;
  /// What was given of the options from the `first` one on, as words of a command line.
  std::vector<std::string> words_given(size_t first) const;

 private:
  std::unique_ptr<CLI::App> app_;
  std::vector<std::function<void()>> checks_;
  void add_path(const NamedPath& kind, std::string& path, const std::string& help);
  std::vector<std::function<NamedPath()>> outputs_;
};

}  // namespace lockstep
