#pragma once
// Signals as something to be read, not as an interruption.

#include <signal.h>

#include "common/system/child_process.h"
#include "common/system/descriptor.h"

namespace lockstep {

/// While it lives, SIGCHLD and the signals that would end this process (HeldSignals) wait until
/// they are read. A reader of stdout that has left is an error of write(), not a signal.
class SignalQueue {
 public:
  /// Throws EnvironmentError.
  SignalQueue();
  ~SignalQueue();
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  /// Readable (poll) when a signal waits.
  int fd() const { return fd_.get(); }
  /// The next signal that waits, or 0.
  int next() const;
  /// This process's earlier signal mask, for children.
  const sigset_t& previous_mask() const { return held_.previous_mask(); }
  /// Ends this process by `signal`, once the object is destroyed.
  void end_by(int signal) { end_by_ = signal; }

 private:
  HeldSignals held_;  // first: the signals take effect when all else is done
  Descriptor fd_;
  int end_by_ = 0;
};

}  // namespace lockstep
