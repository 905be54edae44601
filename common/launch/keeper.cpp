#include "common/launch/keeper.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "common/core/error.h"
#include "common/launch/sessions.h"

namespace lockstep {
namespace {

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

}  // namespace lockstep
