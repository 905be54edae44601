#include "common/comm/peer_meeting.h"

#include <algorithm>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/rendezvous/store.h"
#include "common/rendezvous/transfer.h"
#include "common/rendezvous/wire.h"

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

void PeerMeeting::add(int lower, Connect connect, const std::string& where,
                      const Deadline& deadline) {
  begin(calls_.emplace_back(Call{lower, std::move(connect), where,
                                 Handshake::of_caller(key_, where, lower, rank_)}),
        deadline);
}

void PeerMeeting::begin(Call& call, const Deadline& deadline) {
  Socket socket = call.connect(deadline);
  socket.name_peer(fmt::format("rank {}", call.lower));
  call.handshake = Handshake::of_caller(key_, call.where, call.lower, rank_);
  send_all(socket, bytes_of(call.handshake.take_output()), deadline);
  sockets_[size_t(call.lower)] = std::move(socket);
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
      call_again(deadline);
      look = Deadline(kLookSeconds);
    }
    std::vector<pollfd> entries;
    door_.add_polls(entries);
    for (const Call& call : calls_) {
      const Socket& socket = sockets_[size_t(call.lower)];
      entries.push_back({call.welcome || !socket.is_open() ? -1 : socket.fd(), POLLIN, 0});
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
    place.name_peer(fmt::format("rank {}", guest.rank));
  }
}

void PeerMeeting::hear(Call& call, const Deadline& deadline) {
  Socket& socket = sockets_[size_t(call.lower)];
  try {
    while (socket.is_open() && !call.welcome) {
      const bool proven = call.handshake.state() == Handshake::State::proven;
      std::string some(proven ? 1 : call.handshake.wanted(), '\0');
      const size_t came = socket.receive_some(writable_bytes_of(some));
      if (came == 0) return;
      if (proven) {
        call.welcome = true;
      } else {
        call.handshake.take(std::string_view(some).substr(0, came));
        send_all(socket, bytes_of(call.handshake.take_output()), deadline);
      }
    }
  } catch (const ConnectionClosed& closed) {
    call.closed = closed.what();
    socket.close();
  }
}

/// To the listeners that closed the connection. Where one has closed its door, too, it was no
/// mistake.
void PeerMeeting::call_again(const Deadline& deadline) {
  for (Call& call : calls_) {
    if (sockets_[size_t(call.lower)].is_open()) continue;
    try {
      begin(call, earlier(deadline, Deadline(kLookSeconds)));
    } catch (const Error&) {
      throw ConnectionClosed(call.closed);
    }
  }
}

std::vector<int> PeerMeeting::missing() const {
  std::vector<int> ranks;
  for (const Call& call : calls_) {
    if (!call.welcome) ranks.push_back(call.lower);
  }
  for (int higher = rank_ + 1; size_t(higher) < sockets_.size(); ++higher) {
    if (!sockets_[size_t(higher)].is_open()) ranks.push_back(higher);
  }
  return ranks;
}

}  // namespace lockstep
