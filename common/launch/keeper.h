#pragma once
// The launcher's last will.

#include <sys/types.h>

#include "common/system/descriptor.h"

namespace lockstep {

/// A process that does nothing until this one is gone, however it ended, and then kills the
/// sessions of all ranks that were announced and not released. The kernel's own help,
/// PR_SET_PDEATHSIG, reaches only the ranks themselves, not what they started.
///
/// Make it before any rank: it is forked from this process and must hold nothing that belongs to
/// the ranks.
class Keeper {
 public:
  /// Throws EnvironmentError.
  Keeper();
  /// Ends the keeper. All ranks were released, or killed as far as this process could.
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  /// For announce(), in a child.
  int line() const { return line_.get(); }
  /// The session of this leader is over. Call it before the leader's id is given back.
  void release(pid_t leader) const;

  /// Called by a rank before it becomes the program: at no moment can it have started something
  /// that the keeper does not know about. Safe between fork and exec.
  static void announce(int line, pid_t leader);

 private:
  pid_t process_ = -1;
  Descriptor line_;  // closed by the kernel when this process ends: the keeper's signal
};

}  // namespace lockstep
