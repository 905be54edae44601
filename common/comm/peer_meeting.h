#pragma once
// How every two ranks get a connection: the higher rank connects, the lower rank listens, and both
// prove to each other that they are ranks of this job. Then the listener welcomes the caller by one
// byte. Without that byte the caller connects again: the listener may have dropped the connection
// while the proof was on the way, because strangers had taken all places.

#include <functional>
#include <string>
#include <vector>

#include "common/rendezvous/handshake.h"

namespace lockstep {

class Store;

/// One rank's side. First add() a connection to each lower rank, then meet().
class PeerMeeting {
 public:
  /// Higher ranks come to `listener`, which they know as `where`: no other meeting has that name.
  /// The store must outlive this object.
  PeerMeeting(const Store& store, const Socket& listener, const std::string& where);
  /// add() connects to a lower rank's listener, known as `where`, and begins to prove the key.
  /// `connect` throws EnvironmentError if nobody listens any more; meet() may call it again. add()
  /// throws what `connect` throws, and ConnectionClosed.
  using Connect = std::function<Socket(const Deadline& deadline)>;
  void add(int lower, Connect connect, const std::string& where, const Deadline& deadline);

  struct Rules {
    bool own_user_only = false;  // for Unix sockets
    /// meet() calls it now and then while it waits. Throws if these ranks will not come any more.
    std::function<void(const std::vector<int>& missing)> check_missing;
  };
  /// Returns the connections, by rank, when all have proven the key; this rank's own is closed.
  /// Throws PeerLost naming the ranks that did not come in time; ConnectionClosed; BadInput if a
  /// listener is none of the job's; EnvironmentError.
  std::vector<Socket> meet(const Deadline& deadline, const Rules& rules);

 private:
  struct Visit {
    int lower;
    Connect connect;
    std::string where;
    Handshake handshake;
    bool welcome = false;
    std::string closed{};  // why its connection was closed
  };
  void begin(Visit& visit, const Deadline& deadline);
  void accept(const Rules& rules);
  void hear(Visit& visit, const Deadline& deadline);
  void visit_again(const Deadline& deadline);
  std::vector<int> missing() const;

  const Store& store_;
  const JobKey& key_;
  int rank_;
  FrontDoor door_;
  std::vector<Visit> visits_;
  std::vector<Socket> sockets_;  // by rank; of lower ranks, also before they have proven the key
};

}  // namespace lockstep
