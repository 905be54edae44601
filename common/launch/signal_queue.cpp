#include "common/launch/signal_queue.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/core/error.h"

namespace lockstep {

SignalQueue::SignalQueue() {
  sigset_t awaited = held_.ending();
  sigaddset(&awaited, SIGCHLD);
  fd_ = Descriptor(::signalfd(-1, &awaited, SFD_CLOEXEC | SFD_NONBLOCK));
  if (fd_.get() < 0) fail<EnvironmentError>("cannot receive signals: {}", std::strerror(errno));
}

SignalQueue::~SignalQueue() {
  sigset_t broken_pipe;
  sigemptyset(&broken_pipe);
  sigaddset(&broken_pipe, SIGPIPE);
  const timespec now{};
  ::sigtimedwait(&broken_pipe, nullptr, &now);  // write() reported it
  if (end_by_ != 0) ::raise(end_by_);
}

int SignalQueue::next() const {
  signalfd_siginfo info{};
  return ::read(fd_.get(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo)
                                                              : 0;
}

}  // namespace lockstep
