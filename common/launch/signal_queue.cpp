#include "common/launch/signal_queue.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/core/error.h"

namespace lockstep {

SignalQueue::SignalQueue() {
  sigset_t awaited;
  sigemptyset(&awaited);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    struct sigaction action = {};
    ::sigaction(number, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&awaited, number);
  }
  ::signal(SIGCHLD, SIG_DFL);  // ignored, children would vanish without a status
  sigaddset(&awaited, SIGCHLD);
  fd_ = Descriptor(::signalfd(-1, &awaited, SFD_CLOEXEC | SFD_NONBLOCK));
  if (fd_.get() < 0) fail<EnvironmentError>("cannot receive signals: {}", std::strerror(errno));
  sigaddset(&awaited, SIGPIPE);
  ::sigprocmask(SIG_BLOCK, &awaited, &previous_);
}

SignalQueue::~SignalQueue() {
  sigset_t broken_pipe;
  sigemptyset(&broken_pipe);
  sigaddset(&broken_pipe, SIGPIPE);
  const timespec now{};
  ::sigtimedwait(&broken_pipe, nullptr, &now);  // write() reported it
  if (end_by_ != 0) ::raise(end_by_);
  ::sigprocmask(SIG_SETMASK, &previous_, nullptr);
}

int SignalQueue::next() const {
  signalfd_siginfo info{};
  return ::read(fd_.get(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo)
                                                              : 0;
}

}  // namespace lockstep
