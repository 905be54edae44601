#include "common/app/program.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

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

}  // namespace

int run_program(const char* name, const char* summary, int argc, const char* const* argv,
                const std::function<void(const Options&)>& train) {
  CLI::App app(summary, name);
  Options options;
  try {
    add_options(app, options);
    if (parse_command_line(app, options, argc, argv)) train(options);
  } catch (const Error& error) {
    end_with(error.exit_status(), error.what());
  } catch (const std::exception& error) {
    end_with(1, fmt::format("unexpected: {}", error.what()));
  }
  return 0;
}

}  // namespace lockstep
