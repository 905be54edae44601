#pragma once
// Signals that wait while this process looks after other processes.

#include <signal.h>

namespace lockstep {

/// While it lives, SIGCHLD, SIGPIPE (a reader of stdout that leaves) and the signals that would end
/// this process wait. Those that are ignored on purpose (nohup, a shell's background jobs) stay so,
/// here and in children.
///
/// Make it before the process has threads: another thread would still receive them.
class HeldSignals {
 public:
  HeldSignals();
  /// Restores the mask; signals that have waited take effect.
  ~HeldSignals();
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

  /// Those of SIGINT, SIGTERM, SIGHUP and SIGQUIT that are not ignored.
  const sigset_t& ending() const { return ending_; }
  /// This process's earlier signal mask, for children.
  const sigset_t& previous_mask() const { return previous_; }

 private:
  sigset_t ending_, previous_;
};

}  // namespace lockstep
