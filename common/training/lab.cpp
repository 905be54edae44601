#include "common/training/lab.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/options/report.h"
#include "common/training/program.h"

namespace lockstep {
namespace {

/// What the command line chooses. `AnyLab` is Lab or RankLab.
template <class AnyLab>
class ChosenLab {
 public:
  ChosenLab(OptionParser& parser, const std::vector<AnyLab>& labs) : labs_(labs) {
    std::vector<std::string> names;
    for (const AnyLab& lab : labs_) names.push_back(lab.name);
    const std::string list = fmt::format("{}", fmt::join(names, ", "));
    parser.add("name", name_, list);
    parser.add_flag("--fixed", fixed, "without the mistake");
    parser.check_afterwards([this, list] {
      require(named() != labs_.end(), "lab: found '{}', expected one of {}", name_, list);
    });
  }
  const AnyLab& lab() const { return *named(); }

  bool fixed = false;

 private:
  auto named() const { return std::ranges::find(labs_, name_, &AnyLab::name); }

  const std::vector<AnyLab>& labs_;
  std::string name_;
};

}  // namespace

int run_labs(int argc, const char* const* argv, const std::vector<Lab>& labs) {
  hold_standard_streams();
  report_uncaught_errors();
  OptionParser parser("labs", "Mistakes on one or two devices, to be seen: labs NAME [--fixed].");
  const ChosenLab chosen(parser, labs);
  bool goes_on = false;
  said_once([&] { goes_on = parser.parse(argc, argv); });
  if (goes_on) chosen.lab().run(chosen.fixed);
  require_printed();
  return 0;
}

int run_rank_labs(int argc, const char* const* argv, const std::vector<RankLab>& labs) {
  RankOptions rank_options;
  rank_options.timeout = 3;  // until a missing rank is given up
  OptionParser parser("labs", "Mistakes with several ranks, to be seen: labs NAME [--fixed].");
  const ChosenLab chosen(parser, labs);
  rank_options.add_to(parser);
  std::string devices;  // known when the command line has been read
  parser.check_afterwards([&] { devices = chosen.lab().devices; });
  return run_rank_program(parser, argc, argv, rank_options, devices,
                          [&](ProcessGroup& group) { chosen.lab().run(group, chosen.fixed); });
}

void say(const std::string& line) {
  print_clean("{}\n", line);
  std::fflush(stdout);
}

void say(const ProcessGroup& group, const std::string& line) {
  if (group.rank() == 0) print_clean("{}\n", line);
  std::fflush(stdout);
}

}  // namespace lockstep
