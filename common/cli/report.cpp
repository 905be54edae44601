#include "common/cli/report.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <system_error>

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
  } catch (const std::bad_alloc&) {
    return report(
        1,
        "the system gives no more memory (see ulimit -v, or the container's limit); use a "
        "smaller batch or model, fewer devices or fewer --workers");
  } catch (const std::system_error& error) {
    if (error.code() != std::errc::resource_unavailable_try_again) {
      return report(1, fmt::format("unexpected: {}", error.what()));
    }
    return report(1,
                  "the system gives no more threads (see ulimit -u and -v, or the container's "
                  "limit); use fewer devices, --threads-per-device or --workers");
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
