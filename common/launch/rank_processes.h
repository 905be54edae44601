#pragma once
// The processes of one start: begun together, watched together, ended together.

#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "common/launch/keeper.h"
#include "common/launch/rank_end.h"

namespace lockstep {

/// What a rank's process is made from.
struct RankPlan {
  int rank = 0;      // among all nodes' ranks
  std::string path;  // of the program
  std::vector<std::string> argv;
  std::vector<std::string> environment;  // "NAME=value"
  int out = -1, err = -1;                // descriptors of its output; -1: this process's own
  std::vector<int> inherited;            // descriptors that stay open in the program
  sigset_t signal_mask{};
};

/// Ranks of this node, each the leader of a session of its own. A failed rank remains a zombie,
/// whose id still names its session, until the group is killed; a rank that ended well is cleared
/// away at once, with what it left running.
class RankProcesses {
 public:
  explicit RankProcesses(const Keeper& keeper) : keeper_(keeper) {}
  ~RankProcesses() { kill(); }
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  /// Starts a rank with /dev/null as stdin; it is killed if this thread ends. Throws
  /// EnvironmentError if the program cannot be executed.
  void start(const RankPlan& plan);
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
  /// The ranks that ended, in the order in which that was seen.
  const std::vector<RankEnd>& ends() const { return ends_; }
  bool any_failed() const;
  /// A rank that a signal has stopped, as if it had ended.
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
