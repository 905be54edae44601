#pragma once
// How ranks of one host and user get a key that nobody gave them: rank 0 makes it, and hands it
// out over a Unix socket. The system tells both sides who the other one is (SO_PEERCRED).

#include "common/rendezvous/job_key.h"
#include "common/sockets/connect.h"

namespace lockstep {

/// Rank 0's side. The socket has a name, and no file: it is named after the store's address, which
/// only one process of a host can have.
class KeyDesk {
 public:
  /// `key`: of another source than rank 0, if it is not to be handed out; who asks learns that.
  /// Throws EnvironmentError if another process has the name.
  KeyDesk(const Address& store, const JobKey& key);
  const Socket& listener() const { return listener_; }
  /// Answers those who wait, up to a bound. True if somebody did not get a key: other users get
  /// nothing, and no key of another source is handed out.
  bool serve() const;

 private:
  JobKey key_;
  Socket listener_;
};

/// The key of the job whose store has that address, for `rank`. Throws BadInput if rank 0 has a key
/// that it does not hand out, or is another user's process; PeerLost if nobody answers before the
/// deadline, ConnectionClosed.
JobKey ask_for_key(const Address& store, int rank, const Deadline& deadline);

}  // namespace lockstep
