#include "common/system/child_process.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "common/core/error.h"
#include "common/system/descriptor.h"

namespace lockstep {

HeldSignals::HeldSignals() {
  sigemptyset(&ending_);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    struct sigaction action = {};
    ::sigaction(number, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&ending_, number);
  }
  ::signal(SIGCHLD, SIG_DFL);  // if it were ignored, children would vanish without a status
  sigset_t held = ending_;
  sigaddset(&held, SIGCHLD);
  sigaddset(&held, SIGPIPE);
  ::sigprocmask(SIG_BLOCK, &held, &previous_);
}

HeldSignals::~HeldSignals() { ::sigprocmask(SIG_SETMASK, &previous_, nullptr); }

namespace {

std::string contents(int fd) {
  std::string text;
  std::array<char, 4096> chunk;
  ::lseek(fd, 0, SEEK_SET);
  for (ssize_t count = 0; (count = ::read(fd, chunk.data(), chunk.size())) > 0;) {
    text.append(chunk.data(), static_cast<size_t>(count));
  }
  return text;
}

/// In the child: sends errno through `report`, and ends.
[[noreturn]] void give_up(int report) {
  const int error = errno;
  [[maybe_unused]] const ssize_t sent = ::write(report, &error, sizeof error);
  ::_exit(127);
}

/// In the child: prepares the process and becomes the program. Only system calls; sends errno
/// through `report` if it fails.
[[noreturn]] void become(char* const* argv, pid_t parent, int errors_fd, const sigset_t& mask,
                         int report) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);  // it died before its death would kill this child
  ::signal(SIGTTOU, SIG_IGN);  // a group in the background may still write to the terminal
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  if (nothing < 0) give_up(report);
  ::dup2(nothing, STDIN_FILENO);
  if (errors_fd >= 0) {
    ::dup2(nothing, STDOUT_FILENO);
    ::dup2(errors_fd, STDERR_FILENO);
  }
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  ::execv(argv[0], argv);
  give_up(report);
}

}  // namespace

pid_t ChildRunner::start(const std::vector<std::string>& argv, int errors_fd) {
  std::vector<char*> words;
  for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  std::array<int, 2> ends;
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    fail<EnvironmentError>("cannot start {}: pipe: {}", argv.at(0), std::strerror(errno));
  }
  const Descriptor report(ends[0]);
  Descriptor sender(ends[1]);
  std::fflush(stdout);  // what this process said comes before what the child says
  const pid_t parent = ::getpid(), child = ::fork();
  if (child == 0) become(words.data(), parent, errors_fd, held_.previous_mask(), sender.get());
  int error = child < 0 ? errno : 0;
  sender.close();
  // The child's copy of the pipe closes without a message when exec succeeds.
  if (child > 0 && ::read(report.get(), &error, sizeof error) > 0) ::waitpid(child, nullptr, 0);
  if (error != 0) {
    fail<EnvironmentError>("cannot start {}: {}; is it the program that the build made?",
                           argv.at(0), std::strerror(error));
  }
  return child;
}

void ChildRunner::wait_for(pid_t child) {
  sigset_t awaited = held_.ending();
  sigaddset(&awaited, SIGCHLD);
  while (true) {
    siginfo_t ended{};
    // WNOWAIT leaves a zombie, whose id still names its group.
    ::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOHANG | WNOWAIT);
    if (ended.si_pid == child) break;
    const int number = ::sigwaitinfo(&awaited, nullptr);
    if (number < 0 || number == SIGCHLD) continue;
    ::kill(-child, interrupted_ == 0 ? number : SIGKILL);
    interrupted_ = number;
  }
  ::kill(-child, SIGKILL);  // what the child itself left running
}

ChildResult ChildRunner::run(const std::vector<std::string>& argv, ChildOutput output) {
  const Descriptor errors(output == ChildOutput::quiet ? ::memfd_create("errors", MFD_CLOEXEC)
                                                       : -1);
  const pid_t child = start(argv, errors.get());
  wait_for(child);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (interrupted_ != 0) end_by(interrupted_);
  ChildResult result;
  (WIFSIGNALED(status) ? result.signal : result.status) =
      WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
  if (errors.get() >= 0) result.errors = contents(errors.get());
  return result;
}

void ChildRunner::end_by(int signal) {
  ::raise(signal);  // blocked: takes effect in the destructor
  throw Interrupted();
}

TemporaryFolder::TemporaryFolder() {
  std::error_code error;
  std::string name = std::filesystem::temp_directory_path(error) / "lockstep-XXXXXX";
  if (error || ::mkdtemp(name.data()) == nullptr) {
    fail<EnvironmentError>(
        "cannot make a temporary folder {}: {}; set TMPDIR to a folder that can "
        "be written",
        name, error ? error.message() : std::strerror(errno));
  }
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace lockstep
