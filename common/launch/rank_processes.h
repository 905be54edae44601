#pragma once
// The processes of one start: begun together, watched together, ended together, even if the
// launcher itself is killed.

#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "common/launch/rank_end.h"
#include "common/system/descriptor.h"

namespace lockstep {

/// A process that waits until the launcher is gone, however it ended. Then it kills the sessions of
/// all ranks that were announced and not released. The kernel's own help, PR_SET_PDEATHSIG, reaches
/// only the ranks themselves, not what they started.
///
/// Make it before any rank: the keeper is forked from this process and must hold nothing that
/// belongs to the ranks.
class Keeper {
 public:
  /// Throws EnvironmentError.
  Keeper();
  /// Ends the keeper. By then all ranks are released, or killed as far as this process could.
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  /// The descriptor for announce(), in a child.
  int line() const { return line_.get(); }
  /// Tells the keeper that this leader's session is over. Must come before the id is given back.
  void release(pid_t leader) const;

  /// Tells the keeper of a rank. The rank calls it before it becomes the program: so it can never
  /// have started something that the keeper does not know about. Safe between fork and exec.
  static void announce(int line, pid_t leader);

 private:
  pid_t process_ = -1;
  Descriptor line_;  // closed by the kernel when this process ends: the keeper's signal
};

/// The facts from which a rank's process is made.
struct RankCommand {
  int rank = 0;      // among all nodes' ranks
  std::string path;  // of the program
  std::vector<std::string> argv;
  std::vector<std::string> environment;  // "NAME=value"
  int out = -1, err = -1;                // descriptors of its output; -1: this process's own
  std::vector<int> inherited;            // descriptors that stay open in the program
  sigset_t signal_mask{};
};

/// Ranks of this node, each the leader of a session of its own. A failed rank remains a zombie,
/// whose id still names its session, until the group is killed. A rank that ended well is cleared
/// away at once, with what it left running.
class RankProcesses {
 public:
  explicit RankProcesses(const Keeper& keeper) : keeper_(keeper) {}
  ~RankProcesses() { kill(); }
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  /// Starts a rank with /dev/null as stdin; the rank is killed if this thread ends. Throws
  /// EnvironmentError if the program cannot be executed.
  void start(const RankCommand& command);
  /// Notes which ranks have ended since the last call.
  void collect();
  /// Sends a signal to all processes of all ranks.
  void send(int signal) const;
  /// Kills all processes of all ranks, and returns when they are gone.
  void kill();

  /// Whether any rank's own process is running.
  bool any_running() const { return !running_.empty(); }
  /// Whether any rank's process, or a process that it started, is running.
  bool any_alive() const;
  /// The ranks that ended, in the order in which their ends were seen.
  const std::vector<RankEnd>& ends() const { return ends_; }
  bool any_failed() const;
  /// A rank that a signal has stopped, reported as if it had ended; nothing if there is none.
  std::optional<RankEnd> stopped() const;

 private:
  struct Rank {
    int rank;
    pid_t pid;
  };
  std::vector<pid_t> sessions() const;
  /// Kills what is left of these sessions and gives their ids back.
  void clear(const std::vector<pid_t>& leaders) const;

  const Keeper& keeper_;
  std::vector<Rank> running_;
  std::vector<pid_t> zombies_;  // failed ranks
  std::vector<RankEnd> ends_;
};

}  // namespace lockstep
