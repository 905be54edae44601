#include "common/app/program.h"

#include "common/app/verdict.h"
#include "common/cli/report.h"
#include "common/cli/standard_streams.h"

namespace lockstep {

int run_program(const StageInfo& stage, int argc, const char* const* argv,
                const std::function<void(const Options&)>& train) {
  hold_standard_streams();
  report_uncaught_errors();  // instead of a catch: see there
  int status = 0;
  if (const auto line = parse_command_line(stage, argc, argv)) {
    const auto ended = [&] {
      return stage.start_ranks ? stage.start_ranks(line->options) : std::optional<int>();
    };
    if (line->baseline) {
      status = run_with_baseline(stage, *line);
    } else if (const std::optional<int> of_ranks = ended()) {
      status = *of_ranks;
    } else {
      train(line->options);
    }
  }
  require_printed();
  return status;
}

}  // namespace lockstep
