#include "common/rendezvous/store_server.h"

#include <signal.h>

#include "common/core/error.h"
#include "common/sockets/connect.h"
#include "common/sockets/wire.h"

namespace lockstep {
namespace {

constexpr double kAcceptPauseSeconds = 0.1;
constexpr double kLongestPoll = 3600;
constexpr size_t kMostUnannounced =
    64;  // for who is in and has not said who it is, beside the ranks
constexpr size_t kChunk = 65536;

/// Signals must go to the thread that expects them.
void leave_signals_to_others() {
  sigset_t all;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

/// Null where no rank can need it. It only tells who comes that a given key is not handed out: if
/// another process has its name, ranks that have the key too can do without.
std::optional<KeyDesk> desk_at(const Socket& listener, const JobKey& key) {
  const Address at = listener.local_address();
  if (!is_loopback(at.host) || !key.exists()) return std::nullopt;
  try {
    return KeyDesk(at, key);
  } catch (const EnvironmentError&) {
    if (key.source == JobKey::Source::rank_0) throw;
    return std::nullopt;
  }
}

}  // namespace

struct StoreServer::Connection {
  Connection(FrontDoor::Guest guest, double introduction_seconds)
      : socket(std::move(guest.socket)),
        proven_rank(guest.rank),
        introduction(introduction_seconds) {}
  bool is_stranger() const { return rank < 0; }
  /// Sends what can be sent now.
  void flush() {
    while (!out.empty()) {
      const size_t sent = socket.send_some(bytes_of(out));
      if (sent == 0) return;
      out.erase(0, sent);
    }
    if (ends) socket.close();
  }

  Socket socket;
  int proven_rank;        // of its handshake
  Deadline introduction;  // when it must have said what it wants
  int rank = -1;          // once it has joined
  bool ends = false;      // to be closed when `out` is sent
  std::string in, out;    // bytes that came and are not yet used, bytes that could not be sent yet
};

std::string interface_of(const std::string& host) {
  return is_loopback(host) || is_own_address(host) ? host : "";
}

StoreServer::StoreServer(const Address& address, int world_size, std::string run_id,
                         double introduction_seconds, const JobKey& key)
    : most_strangers_(kMostUnannounced + static_cast<size_t>(world_size)),
      introduction_seconds_(introduction_seconds),
      listener_(listen_on({interface_of(address.host), address.port})),
      port_(listener_.local_address().port),
      desk_(desk_at(listener_, key)),
      door_(listener_, key, kStoreMeeting, 0, world_size, introduction_seconds),
      state_(world_size, std::move(run_id)),
      thread_([this] { run(); }) {}

StoreServer::~StoreServer() {
  stopping_ = true;
  wake_.set();
  thread_.join();
}

void StoreServer::run() {
  leave_signals_to_others();
  while (!stopping_) {
    wait_for_events();
    accept_some();
    let_in();
    for (Connection& connection : connections_) serve(connection);
    state_.expire();
    deliver_answers();
    drop_late_strangers();
    connections_.remove_if([](const Connection& c) { return !c.socket.is_open(); });
  }
  connections_.clear();
}

Deadline StoreServer::next_deadline() const {
  Deadline next =
      earlier(state_.next_deadline().value_or(Deadline(kLongestPoll)), door_.next_deadline());
  for (const Connection& connection : connections_) {
    if (connection.is_stranger()) next = earlier(next, connection.introduction);
  }
  return accept_again_.passed() ? next : earlier(next, accept_again_);
}

void StoreServer::wait_for_events() {
  std::vector<pollfd> entries;
  entries.push_back({wake_.fd(), POLLIN, 0});
  const bool accepts = accept_again_.passed();
  entries.push_back({desk_ && accepts ? desk_->listener().fd() : -1, POLLIN, 0});
  door_.add_polls(entries, accepts);
  for (const Connection& connection : connections_) {
    const int out = connection.out.empty() ? 0 : POLLOUT;
    entries.push_back({connection.socket.fd(), static_cast<short>(POLLIN | out), 0});
  }
  wait_ready(entries, next_deadline());
}

void StoreServer::accept_some() {
  if (!accept_again_.passed()) return;
  try {
    if (desk_ && desk_->serve()) {
      state_.cannot_accept("a process without the job key, or of another user, was turned away");
    }
    door_.accept_some();
  } catch (const EnvironmentError& error) {
    // No descriptor left. Connections that wait to be accepted keep their place in the queue.
    state_.cannot_accept(error.what());
    accept_again_ = Deadline(kAcceptPauseSeconds);
  }
}

void StoreServer::let_in() {
  for (FrontDoor::Guest& guest : door_.hear()) {
    connections_.emplace_back(std::move(guest), introduction_seconds_);
    drop_oldest_stranger();
  }
  if (!door_.last_refused().empty()) state_.cannot_accept(door_.last_refused());
}

/// Where the job trusts its network, anybody is let in: that must not use up the descriptors.
void StoreServer::drop_oldest_stranger() {
  size_t strangers = 0;
  Connection* oldest = nullptr;
  for (Connection& connection : connections_) {
    if (!connection.is_stranger() || !connection.socket.is_open()) continue;
    if (oldest == nullptr) oldest = &connection;
    ++strangers;
  }
  if (strangers > most_strangers_) drop(*oldest);
}

/// Reads and does what a connection asks for. Any mistake of the other side closes the connection.
void StoreServer::serve(Connection& connection) {
  if (!connection.socket.is_open()) return;
  try {
    connection.flush();
    std::string chunk(kChunk, '\0');
    while (connection.socket.is_open()) {
      const size_t came = connection.socket.receive_some(writable_bytes_of(chunk));
      if (came == 0) return;
      if (connection.ends) continue;  // ignore what a refused rank still says
      connection.in.append(chunk, 0, came);
      if (connection.is_stranger()) introduce(connection);
      if (!connection.is_stranger()) handle_requests(connection);
    }
  } catch (const std::exception&) {
    drop(connection);
  }
}

void StoreServer::introduce(Connection& connection) {
  const std::optional<std::string> payload = take_frame(connection.in, kLargestHello);
  if (!payload) return;
  const Hello hello = decode_hello(*payload);
  require_equal(hello.rank, connection.proven_rank, "rank");
  const Reply reply = state_.join(hello);
  if (reply.kind == Reply::Kind::ok) {
    connection.rank = hello.rank;
  } else {
    connection.ends = true;
  }
  connection.out += frame(encode(reply));
  connection.flush();
}

void StoreServer::handle_requests(Connection& connection) {
  while (const std::optional<std::string> payload = take_frame(connection.in, kLargestFrame)) {
    state_.handle(connection.rank, decode_request(*payload));
  }
}

void StoreServer::drop(Connection& connection) {
  connection.socket.close();
  if (!connection.is_stranger()) state_.disconnect(connection.rank);
}

/// Each answer is on its way before the next one is sent: rank 0, which comes last, may end its
/// process.
void StoreServer::deliver_answers() {
  for (auto answers = state_.take_answers(); !answers.empty(); answers = state_.take_answers()) {
    for (const auto& [rank, reply] : answers) {
      for (Connection& connection : connections_) {
        if (connection.rank != rank || !connection.socket.is_open()) continue;
        try {
          connection.out += frame(encode(reply));
          connection.flush();
        } catch (const PeerLost&) {
          drop(connection);  // which may lead to further answers
        }
      }
    }
  }
}

void StoreServer::drop_late_strangers() {
  for (Connection& connection : connections_) {
    if (connection.is_stranger() && connection.introduction.passed()) drop(connection);
  }
}

}  // namespace lockstep
