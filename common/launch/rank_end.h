#pragma once
// How ranks end, and which of these ends caused the others.

#include <sys/types.h>

#include <string>
#include <vector>

namespace lockstep {

struct RankEnd {
  int rank = 0;  // among all nodes' ranks
  pid_t pid = 0;
  int status = 0;  // exit status; 0 if a signal ended it
  int signal = 0;  // the signal that ended it, or 0
  /// The rank has not ended: a signal has stopped it, so its peers gave it up.
  bool stopped = false;
  std::string place{};  // in a mesh, if the rank has told its place: "data 1, tensor 0"

  bool failed() const { return status != 0 || signal != 0 || stopped; }
  /// The status that a shell reports: `status`, or 128 + `signal`. For a stopped rank, the status
  /// with which its peers end.
  int exit_status() const;
  /// Whether this end may be a consequence of a lost peer, not the cause. Signs: the status of
  /// PeerLost (core/error.h), or SIGPIPE, the signal for writing to a peer that has left.
  bool may_be_answer() const;
  /// "was killed by signal 9 (SIGKILL)".
  std::string how() const;
  /// "rank 1 (pid 123) was killed by signal 9 (SIGKILL)"; in a mesh
  /// "rank 2 (data 1, tensor 0; pid 123) was killed by ...".
  std::string text() const;
};

/// The failure that explains the others, among ends in the order in which they were seen. All are
/// from before the launcher stopped anybody; at least one is a failure.
///
/// The order alone does not show the cause. The kernel closes a dying process's sockets before its
/// parent can see it dead. So a peer may notice, and be seen dead, first. So a death by a signal
/// ranks before an exit, and both rank before an end that may be a consequence. Among these SIGPIPE
/// ranks first: it also comes when the reader of stdout has left, and then it is itself the cause.
const RankEnd& cause_of(const std::vector<RankEnd>& ends);

}  // namespace lockstep
