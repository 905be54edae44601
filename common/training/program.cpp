#include "common/training/program.h"

#include <cstdlib>

#include "common/core/error.h"
#include "common/options/report.h"
#include "common/options/standard_streams.h"
#include "common/rendezvous/launch_contract.h"
#include "common/training/verdict.h"

namespace lockstep {
namespace {

/// Refuses to be one of several copies, which would do the same work and write the same files.
void require_one_process(const std::string& name) {
  const auto variable = [](const char* word) -> const char* { return std::getenv(word); };
  const std::string told = sign_of_several(variable);
  require(
      told.empty(),
      "{} is one process, which uses all of --devices, but {} says that it was started as one of "
      "several; start it without a launcher, or unset that variable",
      name, told);
}

}  // namespace

int run_program(const StageInfo& stage, Options& options, const AddOptions& describe, int argc,
                const char* const* argv, const std::function<void()>& train) {
  hold_standard_streams();
  report_uncaught_errors();  // instead of a catch: see its comment
  std::optional<CommandLine> line;
  said_once([&] {
    line = parse_command_line(stage, options, describe, argc, argv);
    if (line && !stage.start_ranks) require_one_process(stage.name);
  });
  int status = 0;
  if (line) {
    const auto ended = [&] {
      return stage.start_ranks ? stage.start_ranks() : std::optional<int>();
    };
    if (line->baseline) {
      status = run_with_baseline(stage, *line);
    } else if (const std::optional<int> of_ranks = ended()) {
      status = *of_ranks;
    } else {
      train();
    }
  }
  require_printed();
  return status;
}

int run_program(const StageInfo& stage, int argc, const char* const* argv,
                const std::function<void(const Options&)>& train) {
  Options options;
  const auto describe = [&](OptionParser& parser) {
    options.add_to(parser);
    parser.begin_group("Devices");  // of what follows, unless it says otherwise
    if (stage.add_options) stage.add_options(parser);
  };
  return run_program(stage, options, describe, argc, argv, [&] { train(options); });
}

}  // namespace lockstep
