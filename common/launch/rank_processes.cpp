#include "common/launch/rank_processes.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "common/core/error.h"
#include "common/launch/sessions.h"

namespace lockstep {
namespace {

/// Texts as exec needs them, made before the fork: a child must not allocate memory.
std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> list;
  list.reserve(texts.size() + 1);
  for (const std::string& text : texts) list.push_back(const_cast<char*>(text.c_str()));
  list.push_back(nullptr);
  return list;
}

struct ExecArguments {
  const char* path;
  std::vector<char*> argv, environment;
};

/// In the child: prepares the process and becomes the program. Only system calls; sends errno
/// through `report` if it fails.
[[noreturn]] void become(const RankPlan& plan, const ExecArguments& exec, pid_t launcher,
                         int keeper_line, int report) {
  const pid_t self = ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != launcher) ::_exit(127);  // it died before its death would kill this child
  Keeper::announce(keeper_line, self);
  ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
  if (plan.out >= 0) ::dup2(plan.out, STDOUT_FILENO);
  if (plan.err >= 0) ::dup2(plan.err, STDERR_FILENO);
  for (const int fd : plan.inherited) ::fcntl(fd, F_SETFD, 0);
  ::sigprocmask(SIG_SETMASK, &plan.signal_mask, nullptr);
  ::execve(exec.path, exec.argv.data(), exec.environment.data());
  const int error = errno;
  [[maybe_unused]] const ssize_t sent = ::write(report, &error, sizeof error);
  ::_exit(127);
}

/// Whether a signal has stopped this child.
bool is_stopped(pid_t child) {
  siginfo_t info{};
  const int options = WSTOPPED | WNOHANG | WNOWAIT;
  return ::waitid(P_PID, static_cast<id_t>(child), &info, options) == 0 && info.si_pid == child;
}

/// Whether this child has ended, and how. It stays a zombie.
bool has_ended(pid_t child, RankEnd& end) {
  siginfo_t info{};
  const int options = WEXITED | WNOHANG | WNOWAIT;
  const int error = ::waitid(P_PID, static_cast<id_t>(child), &info, options);
  if (error != 0 || info.si_pid != child) return false;
  (info.si_code == CLD_EXITED ? end.status : end.signal) = info.si_status;
  return true;
}

}  // namespace

void RankProcesses::start(const RankPlan& plan) {
  const ExecArguments exec{plan.path.c_str(), pointers(plan.argv), pointers(plan.environment)};
  std::array<int, 2> ends{-1, -1};
  const bool piped = ::pipe2(ends.data(), O_CLOEXEC) == 0;
  const Descriptor report(ends[0]);
  Descriptor sender(ends[1]);
  const pid_t launcher = ::getpid(), child = piped ? ::fork() : -1;
  if (child == 0) become(plan, exec, launcher, keeper_.line(), sender.get());
  int error = child < 0 ? errno : 0;
  sender.close();
  // The child's copy of the pipe closes without a message when exec succeeds.
  if (child > 0 && ::read(report.get(), &error, sizeof error) > 0) clear({child});
  if (error != 0) {
    fail<EnvironmentError>("cannot start rank {}: {}: {}", plan.rank, plan.path,
                           std::strerror(error));
  }
  running_.push_back({plan.rank, child});
}

void RankProcesses::collect() {
  std::vector<pid_t> done;
  std::erase_if(running_, [&](const Rank& rank) {
    RankEnd end{.rank = rank.rank, .pid = rank.pid};
    if (!has_ended(rank.pid, end)) return false;
    ends_.push_back(end);
    (end.failed() ? zombies_ : done).push_back(rank.pid);
    return true;
  });
  if (!done.empty()) clear(done);
}

void RankProcesses::send(int signal) const { signal_sessions(sessions(), signal); }

void RankProcesses::kill() {
  clear(sessions());
  running_.clear();
  zombies_.clear();
}

bool RankProcesses::any_alive() const { return lockstep::any_alive(sessions()); }

bool RankProcesses::any_failed() const { return std::ranges::any_of(ends_, &RankEnd::failed); }

std::optional<RankEnd> RankProcesses::stopped() const {
  for (const Rank& rank : running_) {
    if (is_stopped(rank.pid)) return RankEnd{.rank = rank.rank, .pid = rank.pid, .stopped = true};
  }
  return {};
}

std::vector<pid_t> RankProcesses::sessions() const {
  std::vector<pid_t> leaders = zombies_;
  for (const Rank& rank : running_) leaders.push_back(rank.pid);
  return leaders;
}

void RankProcesses::clear(const std::vector<pid_t>& leaders) const {
  if (leaders.empty()) return;
  kill_sessions(leaders);
  for (const pid_t leader : leaders) {
    keeper_.release(leader);
    ::waitpid(leader, nullptr, WNOHANG);
  }
}

}  // namespace lockstep
