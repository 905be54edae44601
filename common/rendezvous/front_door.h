#pragma once
// Where connections wait until they have proven that they are from a rank.

#include <list>
#include <string>
#include <vector>

#include "common/rendezvous/handshake.h"
#include "common/sockets/connect.h"

namespace lockstep {

/// Takes the connections that come to a listener, does the listener's part of their handshakes, and
/// lets in those that prove the job's key. However many others come, they take neither more than
/// a few descriptors nor more than a part of the time: calls return after a bounded number of
/// connections, and where too many wait the oldest goes, those without a word before those that
/// have begun a handshake.
class FrontDoor {
 public:
  /// `where` and `rank` are the listener's in the handshakes. A connection that has proven nothing
  /// after `patience_seconds` is dropped. The listener must outlive the object.
  FrontDoor(const Socket& listener, const JobKey& key, std::string where, int rank, int world_size,
            double patience_seconds);

  struct Guest {
    Socket socket;
    int rank;
  };
  /// Takes what waits at the listener, up to a bound; leaves out other users' processes if
  /// `own_user_only` (for Unix sockets). Throws EnvironmentError if the system has no room for one.
  void accept_some(bool own_user_only = false);
  /// Hears all who are there; those that have proven the key. Their rank may be any number.
  std::vector<Guest> hear();

  /// What to wait for, the listener left out where nobody can be accepted now; and until when.
  void add_polls(std::vector<pollfd>& entries, bool accepts = true) const;
  Deadline next_deadline() const;

  /// The last of those that began a handshake and did not prove the key, for errors that miss a
  /// rank; empty if there was none.
  const std::string& last_refused() const { return last_refused_; }

 private:
  struct Visitor {
    Socket socket;
    Handshake handshake;
    Deadline patience;
  };
  enum class Heard { waits, leaves, proven };
  Heard hear(Visitor& visitor);
  void refuse(const Visitor& visitor, const std::string& why);
  void drop_oldest_of_too_many(std::list<Visitor>& visitors) const;

  const Socket& listener_;
  JobKey key_;
  std::string where_;
  int rank_;
  size_t most_;
  double patience_seconds_;
  std::list<Visitor> silent_, known_;  // before and after the first message, in order of time
  std::string last_refused_;
};

}  // namespace lockstep
