#include "common/launch/rank_processes.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "common/core/error.h"

namespace lockstep {
namespace {

// --- Sessions ------------------------------------------------------------------------------------
//
// A rank leads a session of its own, and with it a process group: all that it starts, and that does
// not leave on purpose. Signals go to groups; but shells with job control and programs like
// timeout(1) put what they start into further groups, and nothing shows whether a group is empty
// once its leader has died. So the members are looked up in /proc, by session. Only a process that
// makes a session of its own (a daemon) gets away.

struct Member {
  pid_t pid = 0, group = 0, session = 0;
  bool alive = false;
};

Member read_member(const char* pid) {
  std::array<char, 32> path{};
  std::snprintf(path.data(), path.size(), "/proc/%.16s/stat", pid);
  const Descriptor file(::open(path.data(), O_RDONLY | O_CLOEXEC));
  std::array<char, 512> text{};
  if (file.get() < 0 || ::read(file.get(), text.data(), text.size() - 1) <= 0) return {};
  // "12 (a name) S parent group session ... threads ...", proc(5). A name may hold anything, even
  // parentheses, so search from the end.
  const char* behind_name = std::strrchr(text.data(), ')');
  Member member;
  char state = 'X';
  int threads = 0;
  if (behind_name == nullptr ||
      std::sscanf(behind_name + 1,
                  " %c %*d %d %d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %d", &state,
                  &member.group, &member.session, &threads) != 4) {
    return {};
  }
  member.pid = static_cast<pid_t>(std::strtol(pid, nullptr, 10));
  // While threads that still hold the process's sockets are dying, its first thread is a zombie.
  member.alive = (state != 'Z' && state != 'X') || threads > 1;
  return member;
}

std::vector<Member> living_members(const std::vector<pid_t>& leaders) {
  std::vector<Member> members;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc"), ::closedir);
  while (folder) {
    const dirent* entry = ::readdir(folder.get());
    if (entry == nullptr) break;
    if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
    const Member member = read_member(entry->d_name);
    if (member.alive && std::ranges::count(leaders, member.session) > 0) members.push_back(member);
  }
  return members;
}

/// Whether a process of one of these sessions is alive. A zombie is not.
bool any_alive_in(const std::vector<pid_t>& leaders) { return !living_members(leaders).empty(); }

/// Sends a signal to all processes of the sessions. A leader's id must not have passed to another
/// process: call it before the leader's parent has waited for the leader, or immediately after.
void signal_sessions(const std::vector<pid_t>& leaders, int signal) {
  // The groups first: whatever a group starts meanwhile gets the signal as well.
  for (const pid_t leader : leaders) ::kill(-leader, signal);
  for (const Member& member : living_members(leaders)) {
    if (std::ranges::count(leaders, member.group) == 0) ::kill(member.pid, signal);
  }
}

/// Kills all processes of the sessions and returns when none is alive: at once, unless the kernel
/// keeps one alive, which is given two seconds.
void kill_sessions(const std::vector<pid_t>& leaders) {
  for (const pid_t leader : leaders) ::kill(-leader, SIGKILL);
  for (int rounds = 0; rounds < 1000; ++rounds) {
    const std::vector<Member> members = living_members(leaders);
    if (members.empty()) return;
    for (const Member& member : members) ::kill(member.pid, SIGKILL);
    const timespec pause{.tv_sec = 0, .tv_nsec = 2'000'000};
    ::nanosleep(&pause, nullptr);
  }
}

// --- The keeper ----------------------------------------------------------------------------------

constexpr pid_t kReady = 1;  // the keeper's only message

void send(int line, pid_t message) {
  // If the keeper was killed, SIGPIPE must not kill the sender, too.
  [[maybe_unused]] const ssize_t sent = ::send(line, &message, sizeof message, MSG_NOSIGNAL);
}

/// The life of the keeper. It leaves the terminal and the launcher's group, so that no signal meant
/// for them ends it, and closes every descriptor that another process may wait to see closed.
[[noreturn]] void keep(int line) {
  ::setsid();
  ::prctl(PR_SET_NAME, "launch-keeper");  // for readers of a process list
  sigset_t all;
  sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  ::dup2(line, STDIN_FILENO);
  ::close_range(STDIN_FILENO + 1, ~0u, 0);
  std::vector<pid_t> leaders;
  pid_t message = 0;
  send(STDIN_FILENO, kReady);
  while (true) {
    const ssize_t count = ::recv(STDIN_FILENO, &message, sizeof message, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;  // the launcher is gone
    if (message > 0) {
      leaders.push_back(message);
    } else {
      std::erase(leaders, -message);
    }
  }
  if (!leaders.empty()) kill_sessions(leaders);
  ::_exit(0);
}

}  // namespace

Keeper::Keeper() {
  std::array<int, 2> ends{-1, -1};
  // Messages stay whole, and those of several senders arrive in order.
  const int error = ::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data());
  line_ = Descriptor(ends[0]);
  Descriptor other(ends[1]);
  if (error == 0) process_ = ::fork();
  if (process_ < 0) {
    fail<EnvironmentError>("cannot start the launcher's keeper: {}", std::strerror(errno));
  }
  if (process_ == 0) {
    line_.close();
    keep(other.get());
  }
  // Until the keeper has left this process's group, it could be killed together with this process.
  other.close();
  pid_t message = 0;
  if (::recv(line_.get(), &message, sizeof message, 0) <= 0) {
    ::waitpid(process_, nullptr, 0);
    fail<EnvironmentError>("the launcher's keeper ended before any rank began; start it again");
  }
}

Keeper::~Keeper() {
  ::kill(process_, SIGKILL);  // every session was released: the keeper has nothing left to do
  while (::waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Keeper::release(pid_t leader) const { send(line_.get(), -leader); }

void Keeper::announce(int line, pid_t leader) { send(line, leader); }

// --- The ranks -----------------------------------------------------------------------------------

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
[[noreturn]] void become(const RankCommand& command, const ExecArguments& exec, pid_t launcher,
                         int keeper_line, int report) {
  const pid_t self = ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != launcher) ::_exit(127);  // it died before its death would kill this child
  Keeper::announce(keeper_line, self);
  ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
  if (command.out >= 0) ::dup2(command.out, STDOUT_FILENO);
  if (command.err >= 0) ::dup2(command.err, STDERR_FILENO);
  for (const int fd : command.inherited) ::fcntl(fd, F_SETFD, 0);
  ::sigprocmask(SIG_SETMASK, &command.signal_mask, nullptr);
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

void RankProcesses::start(const RankCommand& command) {
  const ExecArguments exec{command.path.c_str(), pointers(command.argv),
                           pointers(command.environment)};
  std::array<int, 2> ends{-1, -1};
  const bool piped = ::pipe2(ends.data(), O_CLOEXEC) == 0;
  const Descriptor report(ends[0]);
  Descriptor sender(ends[1]);
  const pid_t launcher = ::getpid(), child = piped ? ::fork() : -1;
  if (child == 0) become(command, exec, launcher, keeper_.line(), sender.get());
  int error = child < 0 ? errno : 0;
  sender.close();
  // The child's copy of the pipe closes without a message when exec succeeds.
  if (child > 0 && ::read(report.get(), &error, sizeof error) > 0) clear({child});
  if (error != 0) {
    fail<EnvironmentError>("cannot start rank {}: {}: {}", command.rank, command.path,
                           std::strerror(error));
  }
  running_.push_back({command.rank, child});
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

bool RankProcesses::any_alive() const { return any_alive_in(sessions()); }

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
