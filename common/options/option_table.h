#pragma once
// What is said about an option where it is added, and the table built from it: one row per option.

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace lockstep {

/// Who must have the same value of an option.
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
  // What is compared and kept: "batch_size", and a value.
  std::string setting_name;
  OptionValue setting_value;
};

using OptionTable = std::vector<OptionRow>;

/// The options as words of a command line, without those that have the same value in `defaults`.
std::vector<std::string> words_unlike(const OptionTable& defaults, const OptionTable& table);

}  // namespace lockstep
