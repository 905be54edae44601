#pragma once
// The calls of Gloo on a context whose ranks are connected, and what every use of Gloo needs around
// it.

#include <gloo/context.h>
#include <signal.h>

#include <memory>
#include <string>

#include "common/comm/host_communicator.h"

namespace lockstep {

/// Gloo may write to a connection whose other side has died. The SIGPIPE that this raises would end
/// this process without a message. The signal is held back in the calling thread, and for good in
/// the thread that Gloo starts meanwhile.
class SigpipeHeldBack {
 public:
  SigpipeHeldBack() {
    ::sigemptyset(&sigpipe_);
    ::sigaddset(&sigpipe_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  ~SigpipeHeldBack() {
    if (::sigismember(&before_, SIGPIPE) == 1) return;
    const timespec at_once{};
    ::sigtimedwait(&sigpipe_, nullptr, &at_once);  // takes away the signal that came
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SigpipeHeldBack(const SigpipeHeldBack&) = delete;
  SigpipeHeldBack& operator=(const SigpipeHeldBack&) = delete;

 private:
  sigset_t sigpipe_, before_;
};

/// Gloo's text without "[file:line] " before it.
inline std::string without_place(const std::string& text) {
  const size_t end = text.starts_with('[') ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

/// The collectives and transfers of this rank.
std::shared_ptr<HostTransport> gloo_collectives(std::shared_ptr<::gloo::Context> context);

}  // namespace lockstep
