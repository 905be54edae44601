#include "common/transports/tcp_mesh.h"

#include <list>

#include "common/core/error.h"
#include "common/rendezvous/store.h"
#include "common/sockets/connect.h"
#include "common/sockets/transfer.h"
#include "common/sockets/wire.h"

namespace lockstep {
namespace {

// What a rank sends when it connects to another: this, and its rank.
constexpr std::string_view kMagic = "LOCKMESH";
constexpr size_t kIntroduction = kMagic.size() + 4;

std::string name_of(int rank) { return fmt::format("rank {}", rank); }

std::string key_of(const std::string& mesh, const char* what, int rank) {
  return fmt::format("{}/{}/rank {}", mesh, what, rank);
}

}  // namespace

TcpMesh::TcpMesh(Store& store, double timeout_seconds, const std::string& name)
    : rank_(store.rank()), peers_(static_cast<size_t>(store.world_size())) {
  const Deadline deadline(timeout_seconds);
  // The address from which this rank reaches the store is where its host can be reached.
  const Socket listener = listen_on({store.local_address().host, 0});
  store.set(key_of(name, "address", rank_), listener.local_address().text());
  connect_to_lower(store, name, deadline);
  store.set(key_of(name, "connected", rank_), "");
  // The store learns at once of a rank that dies; a listener would wait for it. When all have
  // connected, their connections are here, ready to be accepted, and the store is no longer needed.
  for (int other = 0; other < world_size(); ++other) {
    store.get(key_of(name, "connected", other), deadline.seconds_left());
  }
  accept_higher(listener, deadline);
}

/// The higher rank of two connects, so that there is one connection and nobody waits in a circle:
/// to connect, the other rank only has to listen.
void TcpMesh::connect_to_lower(Store& store, const std::string& name, const Deadline& deadline) {
  for (int lower = 0; lower < rank_; ++lower) {
    const std::string key = key_of(name, "address", lower);
    Address address = parse_address(store.get(key, deadline.seconds_left()), key);
    // The store's host is where the store is, whatever its host's name means on that host.
    if (store.is_host(lower)) address.host = store.host_address().host;
    if (is_loopback(address.host) && !is_loopback(store.local_address().host)) {
      fail<EnvironmentError>(
          "rank {} can be reached from its own host only ({}): its MASTER_ADDR leads to a loopback "
          "address there; give the address of rank 0's host in numbers",
          lower, address.text());
    }
    Socket& socket = peers_[static_cast<size_t>(lower)];
    socket = connect_to(address, deadline);
    socket.name_peer(name_of(lower));
    std::string introduction(kMagic);
    put_number(introduction, static_cast<uint64_t>(rank_), 4);
    send_all(socket, bytes_of(introduction), deadline);
  }
}

/// Takes the connections of the higher ranks; any other connection is dropped.
void TcpMesh::accept_higher(const Socket& listener, const Deadline& deadline) {
  struct Stranger {
    Socket socket;
    std::string said{};
  };
  std::list<Stranger> strangers;
  while (!missing_peers().empty()) {
    while (std::optional<Socket> socket = accept_from(listener)) {
      strangers.push_back({std::move(*socket)});
    }
    strangers.remove_if([&](Stranger& s) { return take_introduction(s.socket, s.said); });
    if (missing_peers().empty()) return;
    std::vector<pollfd> entries{{listener.fd(), POLLIN, 0}};
    for (const Stranger& s : strangers) entries.push_back({s.socket.fd(), POLLIN, 0});
    if (!wait_ready(entries, deadline)) {
      fail<PeerLost>("missing ranks: {}: they did not connect to rank {} within {:g} s",
                     missing_peers(), rank_, deadline.seconds());
    }
  }
}

/// True when the stranger is dealt with: it is a peer now, or not worth listening to.
bool TcpMesh::take_introduction(Socket& stranger, std::string& said) {
  try {
    std::string more(kIntroduction - said.size(), '\0');
    more.resize(stranger.receive_some(writable_bytes_of(more)));
    said += more;
  } catch (const ConnectionClosed&) {
    return true;
  }
  if (!kMagic.starts_with(std::string_view(said).substr(0, kMagic.size()))) return true;
  if (said.size() < kIntroduction) return false;
  const uint64_t rank = WireReader(std::string_view(said).substr(kMagic.size())).number(4);
  if (rank <= static_cast<uint64_t>(rank_) || rank >= peers_.size()) return true;
  Socket& place = peers_[rank];
  if (place.is_open()) return true;  // that rank has already connected: this is something else
  place = std::move(stranger);
  place.name_peer(name_of(static_cast<int>(rank)));
  return true;
}

std::string TcpMesh::missing_peers() const {
  std::string missing;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank == rank_ || peers_[static_cast<size_t>(rank)].is_open()) continue;
    missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
  }
  return missing;
}

const Socket& TcpMesh::peer(int rank) const {
  require(0 <= rank && rank < world_size() && rank != rank_,
          "rank {} has no connection to rank {}; expected another one of 0 to {}", rank_, rank,
          world_size() - 1);
  return peers_[static_cast<size_t>(rank)];
}

void TcpMesh::exchange(std::span<const OutgoingBytes> out, std::span<const IncomingBytes> in,
                       double timeout_seconds) {
  std::vector<Sending> sending;
  std::vector<Receiving> receiving;
  for (const OutgoingBytes& message : out) sending.push_back({&peer(message.to), message.bytes});
  for (const IncomingBytes& message : in) receiving.push_back({&peer(message.from), message.bytes});
  if (!broken_.empty()) throw PeerLost(broken_);
  try {
    if (cancelled_) fail<PeerLost>("a transfer was cancelled");
    transfer(sending, receiving, Deadline(timeout_seconds), &cancel_);
  } catch (const Error& error) {
    broken_ = error.what();
    throw;
  }
}

void TcpMesh::exchange(int to, std::span<const std::byte> sent, int from,
                       std::span<std::byte> received, double timeout_seconds) {
  const OutgoingBytes out{to, sent};
  const IncomingBytes in{from, received};
  exchange({&out, 1}, {&in, 1}, timeout_seconds);
}

void TcpMesh::send(int to, std::span<const std::byte> bytes, double timeout_seconds) {
  const OutgoingBytes out{to, bytes};
  exchange({&out, 1}, {}, timeout_seconds);
}

void TcpMesh::receive(int from, std::span<std::byte> bytes, double timeout_seconds) {
  const IncomingBytes in{from, bytes};
  exchange({}, {&in, 1}, timeout_seconds);
}

void TcpMesh::cancel() {
  cancelled_ = true;
  cancel_.set();
}

}  // namespace lockstep
