#include "common/comm/tcp_mesh.h"

#include <algorithm>

#include "common/comm/peer_meeting.h"
#include "common/core/error.h"
#include "common/rendezvous/agreement.h"
#include "common/rendezvous/connect.h"
#include "common/rendezvous/store.h"
#include "common/rendezvous/transfer.h"

namespace lockstep {
namespace {

constexpr const char* kAddresses = "addresses";  // what the ranks meet for

/// A listener alone would wait for a rank that has died.
void require_none_gone(Store& store, const std::vector<int>& missing) {
  for (const int rank : look(store, kAddresses).gone) {
    if (std::ranges::count(missing, rank) > 0) throw PeerLost(who_went_first(store));
  }
}

}  // namespace

TcpMesh::TcpMesh(Store& store, double timeout_seconds)
    : rank_(store.rank()), peers_(static_cast<size_t>(store.world_size())) {
  const Deadline deadline(timeout_seconds);
  // The address from which this rank reaches the store is where its host can be reached.
  const Socket listener = listen_on({store.local_address().host, 0});
  const std::string mine = listener.local_address().text();
  PeerMeeting meeting(store, listener, mine);
  // Nobody connects before all listen: the store learns at once of a rank that dies until then.
  const std::vector<std::string> all =
      lockstep::exchange(store, kAddresses, mine, deadline.seconds_left());
  for (int lower = 0; lower < rank_; ++lower) {
    const std::string& where = all[size_t(lower)];
    meeting.add(
        lower,
        [&store, lower, where](const Deadline& until) {
          return connect_to_lower(store, lower, where, until);
        },
        where, deadline);
  }
  peers_ = meeting.meet(deadline, {.check_missing = [&](const std::vector<int>& missing) {
                          require_none_gone(store, missing);
                        }});
}

/// The higher rank of two connects, so that there is one connection.
Socket TcpMesh::connect_to_lower(const Store& store, int lower, const std::string& where,
                                 const Deadline& deadline) {
  Address address = parse_address(where, fmt::format("address of rank {}", lower));
  // The store's host is where the store is, whatever its host's name means on that host.
  if (store.is_host(lower)) address.host = store.host_address().host;
  if (is_loopback(address.host) && !is_loopback(store.local_address().host)) {
    fail<EnvironmentError>(
        "rank {} can be reached from its own host only ({}): its MASTER_ADDR leads to a loopback "
        "address there; give the address of rank 0's host in numbers",
        lower, address.text());
  }
  return connect_to(address, deadline);
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
    transfer(sending, receiving, Deadline(timeout_seconds));
    for (const Sending& message : sending) bytes_sent_ += std::ssize(message.bytes);
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

}  // namespace lockstep
