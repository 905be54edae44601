#include "common/app/program.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "common/app/verdict.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

[[noreturn]] void end_with(int status, std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::fflush(stdout);
  fmt::print(stderr, "error: {}\n", text);
  std::fflush(stderr);
  std::_Exit(status);
}

/// The end of a program whose exception nobody caught. No stack was unwound: destructors, which may
/// wait for a stream or a peer that will never come, did not run.
[[noreturn]] void end_with_current_exception() {
  try {
    std::rethrow_exception(std::current_exception());
  } catch (const Error& error) {
    end_with(error.exit_status(), error.what());
  } catch (const std::exception& error) {
    end_with(1, fmt::format("unexpected: {}", error.what()));
  } catch (...) {
    end_with(1, "unexpected: an exception of unknown type");
  }
}

}  // namespace

void report_uncaught_errors() { std::set_terminate(end_with_current_exception); }

int run_program(const StageInfo& stage, int argc, const char* const* argv,
                const std::function<void(const Options&)>& train) {
  report_uncaught_errors();  // instead of a catch: see there
  int status = 0;
  if (const auto line = parse_command_line(stage, argc, argv)) {
    if (line->baseline) {
      status = run_with_baseline(stage, *line);
    } else {
      train(line->options);
    }
  }
  if (std::fflush(stdout) != 0) fail<EnvironmentError>("stdout: {}", std::strerror(errno));
  return status;
}

}  // namespace lockstep
