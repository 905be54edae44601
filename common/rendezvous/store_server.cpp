#include "common/rendezvous/store_server.h"

#include <signal.h>

#include <array>

#include "common/core/error.h"
#include "common/sockets/connect.h"
#include "common/sockets/wire.h"

namespace lockstep {
namespace {

constexpr double kAcceptPauseSeconds = 0.1;
constexpr double kLongestPoll = 3600;
constexpr size_t kSparePlaces = 64;  // for strangers, in addition to one for each rank
constexpr size_t kChunk = 65536;

/// Signals must go to the thread that expects them.
void leave_signals_to_others() {
  sigset_t all;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

}  // namespace

struct StoreServer::Connection {
  Connection(Socket socket, double introduction_seconds)
      : socket(std::move(socket)), introduction(introduction_seconds) {}
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
  Deadline introduction;  // when it must have said who it is
  int rank = -1;
  bool greeted = false;  // it has sent the magic
  bool ends = false;     // to be closed when `out` is sent
  std::string in, out;   // bytes that came and are not yet used, bytes that could not be sent yet
};

StoreServer::StoreServer(const Address& address, int world_size, std::string run_id,
                         double introduction_seconds)
    : most_strangers_(kSparePlaces + static_cast<size_t>(world_size)),
      introduction_seconds_(introduction_seconds),
      listener_(listen_on({is_loopback(address.host) ? address.host : "", address.port})),
      port_(listener_.local_address().port),
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
    accept_all();
    for (Connection& connection : connections_) serve(connection);
    state_.expire();
    deliver_answers();
    drop_late_strangers();
    connections_.remove_if([](const Connection& c) { return !c.socket.is_open(); });
  }
  connections_.clear();
}

Deadline StoreServer::next_deadline() const {
  Deadline next = state_.next_deadline().value_or(Deadline(kLongestPoll));
  for (const Connection& connection : connections_) {
    if (connection.is_stranger()) next = earlier(next, connection.introduction);
  }
  return accept_again_.passed() ? next : earlier(next, accept_again_);
}

void StoreServer::wait_for_events() {
  std::vector<pollfd> entries;
  entries.push_back({wake_.fd(), POLLIN, 0});
  entries.push_back({accept_again_.passed() ? listener_.fd() : -1, POLLIN, 0});
  for (const Connection& connection : connections_) {
    const int out = connection.out.empty() ? 0 : POLLOUT;
    entries.push_back({connection.socket.fd(), static_cast<short>(POLLIN | out), 0});
  }
  wait_ready(entries, next_deadline());
}

void StoreServer::accept_all() {
  if (!accept_again_.passed()) return;
  try {
    while (std::optional<Socket> socket = accept_from(listener_)) {
      connections_.emplace_back(std::move(*socket), introduction_seconds_);
      drop_oldest_stranger();
    }
  } catch (const EnvironmentError& error) {
    // No descriptor left. Connections that wait to be accepted keep their place in the queue.
    state_.cannot_accept(error.what());
    accept_again_ = Deadline(kAcceptPauseSeconds);
  }
}

/// Silent connections must not use up the descriptors of the process.
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
  std::string& in = connection.in;
  if (!connection.greeted) {
    require(kStoreMagic.starts_with(std::string_view(in).substr(0, kStoreMagic.size())),
            "a stranger");
    if (in.size() < kStoreMagic.size()) return;
    in.erase(0, kStoreMagic.size());
    connection.greeted = true;
  }
  const std::optional<std::string> payload = take_frame(in, kLargestHello);
  if (!payload) return;
  const Hello hello = decode_hello(*payload);
  const Reply reply = state_.join(hello);
  if (reply.kind == Reply::Kind::ok) {
    connection.rank = hello.rank;
  } else {
    connection.ends = true;
  }
  connection.out += std::string(kStoreMagic) + frame(encode(reply));
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
