#pragma once
// How two ranks prove to each other that they have the job's key, without telling it.
//
//   caller    "LOCKSTEP", version, kind of key, its rank, a nonce (random bytes, used once)
//   listener  "LOCKSTEP", version, kind of key, a nonce, its proof
//   caller    its proof
//
// A proof is an HMAC, by the key, of who gives it (caller or listener), where they meet, both ranks
// and both nonces. So no proof fits twice: an overheard proof has another nonce, a proof that is
// sent back to its giver comes from the wrong side, and a proof of another meeting names another
// place. Mirrors the three passes of ISO/IEC 9798-4. Without a key, proofs are zeros and prove
// nothing.

#include <list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/rendezvous/job_key.h"
#include "common/rendezvous/socket.h"

namespace lockstep {

constexpr std::string_view kHandshakeMagic = "LOCKSTEP";
constexpr uint32_t kHandshakeVersion = 3;
constexpr size_t kNonceBytes = 32;

/// The other side speaks another protocol.
class NotLockstep : public ErrorOfKind<NotLockstep> {
 public:
  using ErrorOfKind::ErrorOfKind;
};

/// One side of one meeting. Never waits: the owner of the object moves the bytes.
class Handshake {
 public:
  /// `where` distinguishes meetings, and is the same on both sides. The caller, who connected,
  /// knows the listener's rank; the listener learns the caller's.
  static Handshake of_caller(const JobKey& key, const std::string& where, int listener, int caller);
  static Handshake of_listener(const JobKey& key, const std::string& where, int listener);

  enum class State { going, proven, refused };
  State state() const { return state_; }
  /// Takes the bytes that have to be sent now; empty if none. A listener that has just refused has
  /// bytes, too: from them the caller learns what kind of key was expected.
  std::string take_output() { return std::exchange(out_, {}); }
  /// How many bytes to read at most, so that no bytes behind the handshake are taken.
  size_t wanted() const;
  /// Takes bytes that came. A caller throws BadInput if the keys or the versions differ, and
  /// NotLockstep. A listener refuses, and does not answer a side that speaks another protocol.
  void take(std::string_view bytes);

  /// The rank that the caller claims; -1 before the claim. The claim is true once it is proven.
  int caller() const { return caller_; }
  /// Why a listener refused: "it has no job key".
  const std::string& why_refused() const { return why_refused_; }

 private:
  Handshake(const JobKey& key, bool calls, const std::string& where, int listener, int caller);
  bool has_head() const { return calls_ || caller_ < 0; }
  std::string new_nonce() const;
  size_t message_size() const;
  bool take_head();
  void take_first_message();
  void answer(const std::string& proof);
  void take_answer();
  void take_proof();
  void refuse(const std::string& why);
  std::string proof_of(std::string_view side) const;
  bool proves(std::string_view proof, std::string_view side) const;

  JobKey key_;
  bool calls_;
  std::string where_;
  int listener_, caller_;
  std::string callers_nonce_, listeners_nonce_;
  std::string in_, out_;
  State state_ = State::going;
  std::string why_refused_;
};

/// Does the caller's part, and returns once the listener has proven the key. Throws as take() does;
/// PeerLost after the deadline, ConnectionClosed.
void prove_to_listener(const Socket& socket, Handshake handshake, const Deadline& deadline);

/// Keeps connections waiting until they have proven that they are from a rank. Takes them from a
/// listener, does the listener's part of their handshakes, and lets in those that prove the job's
/// key. Other connections, however many, take only a few descriptors and a part of the time: calls
/// return after a bounded number of connections. If too many wait, the oldest is dropped, and
/// silent connections are dropped before those that have begun a handshake.
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
  /// Takes the connections that wait at the listener, up to a bound; refuses other users' processes
  /// if `own_user_only` (for Unix sockets). Throws EnvironmentError if the system has no room.
  void accept_some(bool own_user_only = false);
  /// Hears all connections; returns those that have proven the key. A rank may be any number.
  std::vector<Guest> hear();

  /// Adds what to wait for, without the listener if nobody can be accepted now; and until when.
  void add_polls(std::vector<pollfd>& entries, bool accepts = true) const;
  Deadline next_deadline() const;

  /// Names the last connection that began a handshake and did not prove the key, for errors about
  /// missing ranks; empty if there was none.
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
