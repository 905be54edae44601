#pragma once
// The one key of a job: a process that knows the key is one of the job's ranks. Ranks prove to each
// other that they know it (handshake.h) before they say anything else.

#include <cstdint>
#include <functional>
#include <string>

#include "common/rendezvous/socket.h"

namespace lockstep {

struct JobKey {
  enum class Source : uint8_t {
    none,      // the job trusts its network
    secret,    // LOCKSTEP_JOB_SECRET, or the file that LOCKSTEP_JOB_SECRET_FILE names
    launcher,  // `lockstep launch` on one host made it
    open_mpi,  // mpirun made it
    rank_0,    // rank 0 made it, for ranks of its host and user (KeyDesk)
  };
  Source source = Source::none;
  std::string bytes{};

  bool exists() const { return source != Source::none; }
};

/// "no job key", "a job key from LOCKSTEP_JOB_SECRET".
std::string describe(JobKey::Source source);

/// Reads the key from the environment, from the first source above that has one. Returns none if
/// nothing is set. Throws BadInput for a secret that is too short or too long. The same for a file
/// that others might have read or written: not mode 0600, not this user's, no regular file, a link.
/// Throws EnvironmentError for a secret in a build that cannot use one: a secret is never ignored.
JobKey read_job_key(const std::function<const char*(const char* name)>& variable);
/// The same from this process's environment.
JobKey read_job_key();
/// The same, once this process is a rank. Takes secrets out of the environment, so that programs
/// which the rank starts do not inherit them. Returns the same key again when asked again. Call it
/// before other threads may read the environment.
JobKey take_job_key();

constexpr size_t kJobKeyBytes = 32;  // of the keys that we make
/// Makes a new key of rank 0.
JobKey random_job_key();

/// Gives a key to ranks of one host and user if the user gave none. Rank 0 makes the key, and hands
/// it out over a Unix socket. The system tells both sides who the other one is (SO_PEERCRED). This
/// is rank 0's side. The socket has a name, and no file: the name is made from the store's address,
/// which only one process of a host can have.
class KeyDesk {
 public:
  /// A `key` of another source than rank 0 is not handed out: a rank that asks learns its source.
  /// Throws EnvironmentError if another process has the name.
  KeyDesk(const Address& store, const JobKey& key);
  const Socket& listener() const { return listener_; }
  /// Answers the ranks that wait, up to a bound. True if somebody did not get a key: other users
  /// get nothing, and no key of another source is handed out.
  bool serve() const;

 private:
  JobKey key_;
  Socket listener_;
};

/// Asks, as `rank`, for the key of the job whose store has this address. Throws BadInput if rank 0
/// has a key that it does not hand out, or is another user's process. Throws PeerLost if nobody
/// answers before the deadline; ConnectionClosed.
JobKey ask_for_key(const Address& store, int rank, const Deadline& deadline);

}  // namespace lockstep
