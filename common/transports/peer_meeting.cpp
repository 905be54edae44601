#include "common/transports/peer_meeting.h"

#include <algorithm>

#include "common/core/error.h"
#include "common/rendezvous/rank_names.h"
#include "common/rendezvous/store.h"
#include "common/sockets/transfer.h"
#include "common/sockets/wire.h"

namespace lockstep {
namespace {

constexpr double kStrangersPatience = 10;  // seconds
constexpr double kLookSeconds = 0.05;      // between two looks for ranks that will not come

}  // namespace

PeerMeeting::PeerMeeting(const Store& store, const Socket& listener, const std::string& where)
    : key_(store.key()),
      rank_(store.rank()),
      door_(listener, key_, where, rank_, store.world_size(), kStrangersPatience),
      sockets_(size_t(store.world_size())) {}

void PeerMeeting::add(int lower, Socket socket, const std::string& where,
                      const Deadline& deadline) {
  socket.name_peer(fmt::format("rank {}", lower));
  Call& call = calls_.emplace_back(Call{lower, Handshake::of_caller(key_, where, lower, rank_)});
  send_all(socket, bytes_of(call.handshake.take_output()), deadline);
  sockets_[size_t(lower)] = std::move(socket);
}

std::vector<Socket> PeerMeeting::meet(const Deadline& deadline, const Rules& rules) {
  Deadline look(kLookSeconds);
  while (true) {
    accept(rules);
    for (Call& call : calls_) hear(call, deadline);
    const std::vector<int> missing = this->missing();
    if (missing.empty()) return std::move(sockets_);
    if (deadline.passed()) {
      fail<PeerLost>("missing ranks: {}: they did not connect to rank {} within {:g} s{}",
                     listed(missing), rank_, deadline.seconds(),
                     door_.last_refused().empty() ? "" : "; " + door_.last_refused());
    }
    if (look.passed()) {
      rules.check_missing(missing);
      look = Deadline(kLookSeconds);
    }
    std::vector<pollfd> entries;
    door_.add_polls(entries);
    for (const Call& call : calls_) {
      const bool waits = call.handshake.state() == Handshake::State::going;
      entries.push_back({waits ? sockets_[size_t(call.lower)].fd() : -1, POLLIN, 0});
    }
    wait_ready(entries, earlier(deadline, look));
  }
}

/// Guests with a rank that is none, or is here already, are something else.
void PeerMeeting::accept(const Rules& rules) {
  door_.accept_some(rules.own_user_only);
  for (FrontDoor::Guest& guest : door_.hear()) {
    if (guest.rank <= rank_ || size_t(guest.rank) >= sockets_.size()) continue;
    Socket& place = sockets_[size_t(guest.rank)];
    if (place.is_open()) continue;
    place = std::move(guest.socket);
    place.name_peer(fmt::format("rank {}", guest.rank));
  }
}

void PeerMeeting::hear(Call& call, const Deadline& deadline) {
  const Socket& socket = sockets_[size_t(call.lower)];
  while (call.handshake.state() == Handshake::State::going) {
    std::string some(call.handshake.wanted(), '\0');
    const size_t came = socket.receive_some(writable_bytes_of(some));
    if (came == 0) return;
    call.handshake.take(std::string_view(some).substr(0, came));
    send_all(socket, bytes_of(call.handshake.take_output()), deadline);
  }
}

std::vector<int> PeerMeeting::missing() const {
  std::vector<int> ranks;
  for (const Call& call : calls_) {
    if (call.handshake.state() == Handshake::State::going) ranks.push_back(call.lower);
  }
  for (int higher = rank_ + 1; size_t(higher) < sockets_.size(); ++higher) {
    if (!sockets_[size_t(higher)].is_open()) ranks.push_back(higher);
  }
  return ranks;
}

}  // namespace lockstep
