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
  int launcher_pipe = -1;                // a pipe on which it may tell something (launcher_pipe.h)
  sigset_t signal_mask{};
};

/// Ranks of this node, each the leader of a session of its own. A rank that has died remains a
/// zombie, whose id stands for its session, until the group is killed; one that ended well is
/// cleared away at once, with what it left running.
class RankProcesses {
 public:
  explicit RankProcesses(const Keeper& keeper) : keeper_(keeper) {}
  ~RankProcesses() { kill(); }
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  /// Starts a rank, which gets /dev/null to read and is killed if this thread ends. Throws
  /// EnvironmentError if the program cannot be executed.
  void start(const RankPlan& plan);
  /// Notes who has ended since the last call.
  void collect();
  /// Sends a signal to all processes of all ranks.
  void send(int signal) const;
  /// Kills all processes of all ranks, and returns when they are gone.
  void kill();

  /// Ranks whose own process runs.
  bool any_running() const { return !running_.empty(); }
  /// Ranks' processes, or what they started, that run.
  bool any_alive() const;
  /// Who ended, in the order in which it was seen.
  const std::vector<RankEnd>& ends() const { return ends_; }
  bool any_failed() const;
  /// A rank that runs no further since a signal has stopped it, as if that were its end.
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
