#include "common/comm/peer_meeting.h"

#include <algorithm>

#include "common/core/error.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/store.h"
#include "common/rendezvous/wire.h"

namespace lockstep {
namespace {

constexpr double kStrangersPatience = 10;  // seconds
constexpr double kLookSeconds = 0.05;      // between two looks for ranks that will not come

}  // namespace

PeerMeeting::PeerMeeting(const Store& store, const Socket& listener, const std::string& where)
    : store_(store),
      key_(store.key()),
      rank_(store.rank()),
      door_(listener, key_, where, rank_, store.world_size(), kStrangersPatience),
      sockets_(size_t(store.world_size())) {}

void PeerMeeting::add(int lower, Connect connect, const std::string& where,
                      const Deadline& deadline) {
  begin(visits_.emplace_back(Visit{lower, std::move(connect), where,
                                   Handshake::of_caller(key_, where, lower, rank_)}),
        deadline);
}

void PeerMeeting::begin(Visit& visit, const Deadline& deadline) {
  Socket socket = visit.connect(deadline);
  socket.name_peer(store_.name_of(visit.lower));
  visit.handshake = Handshake::of_caller(key_, visit.where, visit.lower, rank_);
  send_all(socket, bytes_of(visit.handshake.take_output()), deadline);
  sockets_[size_t(visit.lower)] = std::move(socket);
}

std::vector<Socket> PeerMeeting::meet(const Deadline& deadline, const Rules& rules) {
  Deadline look(kLookSeconds);
  while (true) {
    accept(rules);
    for (Visit& visit : visits_) hear(visit, deadline);
    const std::vector<int> missing = this->missing();
    if (missing.empty()) return std::move(sockets_);
    if (deadline.passed()) {
      fail<PeerLost>("{} did not connect to {} within {:g} s{}", store_.names_of(missing),
                     store_.name_of(rank_), deadline.seconds(),
                     door_.last_refused().empty() ? "" : "; " + door_.last_refused());
    }
    if (look.passed()) {
      rules.check_missing(missing);
      visit_again(deadline);
      look = Deadline(kLookSeconds);
    }
    std::vector<pollfd> entries;
    door_.add_polls(entries);
    for (const Visit& visit : visits_) {
      const Socket& socket = sockets_[size_t(visit.lower)];
      entries.push_back({visit.welcome || !socket.is_open() ? -1 : socket.fd(), POLLIN, 0});
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
    try {
      const std::byte welcome{};
      send_all(guest.socket, {&welcome, 1}, Deadline(0));
    } catch (const PeerLost&) {
      continue;  // it is gone, and comes again if it is a rank
    }
    place = std::move(guest.socket);
    place.name_peer(store_.name_of(guest.rank));
  }
}

void PeerMeeting::hear(Visit& visit, const Deadline& deadline) {
  Socket& socket = sockets_[size_t(visit.lower)];
  try {
    while (socket.is_open() && !visit.welcome) {
      const bool proven = visit.handshake.state() == Handshake::State::proven;
      std::string some(proven ? 1 : visit.handshake.wanted(), '\0');
      const size_t came = socket.receive_some(writable_bytes_of(some));
      if (came == 0) return;
      if (proven) {
        visit.welcome = true;
      } else {
        visit.handshake.take(std::string_view(some).substr(0, came));
        send_all(socket, bytes_of(visit.handshake.take_output()), deadline);
      }
    }
  } catch (const ConnectionClosed& closed) {
    visit.closed = closed.what();
    socket.close();
  }
}

/// To the listeners that closed the connection. Where one has closed its door, too, it was no
/// mistake.
void PeerMeeting::visit_again(const Deadline& deadline) {
  for (Visit& visit : visits_) {
    if (sockets_[size_t(visit.lower)].is_open()) continue;
    try {
      begin(visit, earlier(deadline, Deadline(kLookSeconds)));
    } catch (const Error&) {
      throw ConnectionClosed(visit.closed);
    }
  }
}

std::vector<int> PeerMeeting::missing() const {
  std::vector<int> ranks;
  for (const Visit& visit : visits_) {
    if (!visit.welcome) ranks.push_back(visit.lower);
  }
  for (int higher = rank_ + 1; size_t(higher) < sockets_.size(); ++higher) {
    if (!sockets_[size_t(higher)].is_open()) ranks.push_back(higher);
  }
  return ranks;
}

}  // namespace lockstep
