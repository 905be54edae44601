#pragma once
// The store's side of the rendezvous: one thread in rank 0's process that serves all ranks.

#include <atomic>
#include <list>
#include <string>
#include <thread>
#include <vector>

#include "common/rendezvous/front_door.h"
#include "common/rendezvous/key_desk.h"
#include "common/rendezvous/store_state.h"
#include "common/sockets/socket.h"

namespace lockstep {

/// Where a store listens: the host itself if that is a loopback address, or one of this host's own
/// in numbers. Else "", all interfaces: a host's name often means one address on the host and
/// another elsewhere, and behind NAT or a service of Kubernetes no interface has the address.
std::string interface_of(const std::string& host);

/// A connection that is not from a rank (a port scanner, a browser, half a message, silence) is
/// dropped; the ranks do not notice. A rank whose connection closes before it said leave has died.
class StoreServer {
 public:
  /// Listens on a port of `address`, at its interface_of(), and starts to serve. A connection that
  /// has not proven `key`, or is without an introduction, in `introduction_seconds` is dropped.
  /// Where only this host is served, ranks without a key can ask for it (key_desk.h).
  /// Throws EnvironmentError, at once, if the port is taken.
  StoreServer(const Address& address, int world_size, std::string run_id,
              double introduction_seconds, const JobKey& key = {});
  /// Closes all connections within milliseconds.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// The port that it listens on.
  int port() const { return port_; }

 private:
  struct Connection;

  void run();
  void wait_for_events();
  Deadline next_deadline() const;
  void accept_some();
  void let_in();
  void drop_oldest_stranger();
  void serve(Connection& connection);
  void introduce(Connection& connection);
  void handle_requests(Connection& connection);
  void drop(Connection& connection);
  void deliver_answers();
  void drop_late_strangers();

  size_t most_strangers_;
  double introduction_seconds_;
  Socket listener_;
  int port_;
  std::optional<KeyDesk> desk_;
  FrontDoor door_;
  StoreState state_;
  std::list<Connection> connections_;  // in the order in which they came
  Deadline accept_again_{0};           // when the system may again have room for connections
  WakeUp wake_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;  // last: it uses all the others
};

}  // namespace lockstep
