#include "common/options/report.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <mutex>
#include <new>
#include <system_error>

#include "common/core/error.h"
#include "common/core/host.h"
#include "common/core/text.h"
#include "common/system/rank.h"

namespace lockstep {
namespace {

int report(int status, const std::string& text) {
  std::fflush(stdout);
  // fputs does not throw if it fails.
  std::fputs(fmt::format("error: {}\n", on_one_line(text)).c_str(), stderr);
  std::fflush(stderr);
  return status;
}

/// Asks for no memory itself.
int report_no_memory() {
  std::fflush(stdout);
  std::fputs("error: the system gives no more memory", stderr);
  std::fputs(memory_limit_note().data(), stderr);
  std::fputs("; use a smaller batch or model, fewer devices or fewer --workers\n", stderr);
  return 1;
}

void report_before_terminating() {
  // Destructors, which may wait for a stream or a peer that will never come, do not run.
  std::set_terminate([] {
    static std::mutex first;  // of several threads that fail, one reports
    first.lock();
    std::_Exit(report_current_exception());
  });
}

// Libraries that a program is linked with ask for memory before main() begins (oneDNN 3 does), and
// a refusal ends the process. The functions in this section run before theirs. Under a sanitizer
// they would run before its own beginning.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
using Function = void (*)();
[[gnu::section(".preinit_array"), gnu::used]] const Function first = report_before_terminating;
#endif

}  // namespace

void hold_standard_streams() {
  int fd = 0;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::open("/dev/null", O_RDONLY);
  if (fd >= 0) ::close(fd);
}

int report_current_exception() try {
  try {
    std::rethrow_exception(std::current_exception());
  } catch (const SaidByAnother& error) {
    return error.exit_status();
  } catch (const Error& error) {
    return report(error.exit_status(), error.what());
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::filesystem::filesystem_error& error) {
    return report(1, fmt::format("{}: {}; name another path", error.path1().string(),
                                 error.code().message()));
  } catch (const std::system_error& error) {
    if (error.code() != std::errc::resource_unavailable_try_again) {
      return report(1, fmt::format("unexpected: {}", error.what()));
    }
    return report(1,
                  fmt::format("the system gives no more threads (see also ulimit -u){}; use fewer "
                              "devices, --threads-per-device or --workers",
                              memory_limit_note().data()));
  } catch (const std::exception& error) {
    return report(1, fmt::format("unexpected: {}", error.what()));
  } catch (...) {
    return report(1, "unexpected: an exception of unknown type");
  }
} catch (const std::bad_alloc&) {  // that one, or there is no memory for the text of another
  return report_no_memory();
}

void said_once(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    if (!say_through_launcher(on_one_line(error.what()))) throw;
    throw SaidByAnother(error.what(), error.exit_status());
  }
}

void report_uncaught_errors() {
  std::signal(SIGXFSZ, SIG_IGN);  // at a limit on file size write() fails, and that is reported
  report_before_terminating();
}

void require_printed() {
  const char* const reason = std::fflush(stdout) != 0   ? std::strerror(errno)
                             : std::ferror(stdout) != 0 ? "an earlier write failed"
                                                        : nullptr;
  if (reason != nullptr) fail<EnvironmentError>("stdout: {}; what was printed is lost", reason);
}

}  // namespace lockstep
