#pragma once
// The launcher's last will.

#include <sys/types.h>

#include "common/system/descriptor.h"

namespace lockstep {

/// A process that does nothing until this one is gone, however it ended, and then kills the
/// sessions of all ranks that were announced and not released. The kernel's own help,
/// PR_SET_PDEATHSIG, reaches only the ranks themselves, not what they started.
///
/// To be made before any rank: it is forked from this process and must hold nothing of theirs.
class Keeper {
 public:
  /// Throws EnvironmentError.
  Keeper();
  /// Ends the process. All ranks were released, or killed as well as this process could.
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  /// For announce(), in a child.
  int line() const { return line_.get(); }
  /// The session of this leader is over. To be called before the leader's id is given back.
  void release(pid_t leader) const;

  /// Called by a rank before it becomes the program: there is no moment in which it could have
  /// started something that the keeper does not know. Safe between fork and exec.
  static void announce(int line, pid_t leader);

 private:
  pid_t process_ = -1;
  Descriptor line_;  // closed by the kernel when this process ends: that is the sign
};

}  // namespace lockstep
