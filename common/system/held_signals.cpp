#include "common/system/held_signals.h"

#include <initializer_list>

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

}  // namespace lockstep
