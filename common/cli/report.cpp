#include "common/cli/report.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "common/core/error.h"

namespace lockstep {
namespace {

int report(int status, std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::fflush(stdout);
  std::fputs(fmt::format("error: {}\n", text).c_str(), stderr);  // throws nothing if it fails
  std::fflush(stderr);
  return status;
}

}  // namespace

int report_current_exception() {
  try {
    std::rethrow_exception(std::current_exception());
  } catch (const SaidByAnother& error) {
    return error.exit_status();
  } catch (const Error& error) {
    return report(error.exit_status(), error.what());
  } catch (const std::exception& error) {
    return report(1, fmt::format("unexpected: {}", error.what()));
  } catch (...) {
    return report(1, "unexpected: an exception of unknown type");
  }
}

void report_uncaught_errors() {
  // Destructors, which may wait for a stream or a peer that will never come, do not run.
  std::set_terminate([] { std::_Exit(report_current_exception()); });
}

}  // namespace lockstep
