#include "common/rendezvous/front_door.h"

#include "common/core/error.h"
#include "common/sockets/transfer.h"
#include "common/sockets/unix_socket.h"
#include "common/sockets/wire.h"

namespace lockstep {
namespace {

constexpr int kAcceptedAtOnce = 64;
constexpr size_t kSparePlaces = 64;  // for strangers, in addition to one for each rank
constexpr double kLongest = 3600;

}  // namespace

FrontDoor::FrontDoor(const Socket& listener, const JobKey& key, std::string where, int rank,
                     int world_size, double patience_seconds)
    : listener_(listener),
      key_(key),
      where_(std::move(where)),
      rank_(rank),
      most_(kSparePlaces + static_cast<size_t>(world_size)),
      patience_seconds_(patience_seconds) {}

void FrontDoor::accept_some(bool own_user_only) {
  for (int i = 0; i < kAcceptedAtOnce; ++i) {
    std::optional<Socket> socket = accept_from(listener_);
    if (!socket) return;
    if (own_user_only && !has_same_user(*socket)) continue;
    silent_.push_back({std::move(*socket), Handshake::of_listener(key_, where_, rank_),
                       Deadline(patience_seconds_)});
    drop_oldest_of_too_many(silent_);
  }
}

/// Silent connections must not use up the descriptors of the process.
void FrontDoor::drop_oldest_of_too_many(std::list<Visitor>& visitors) const {
  if (visitors.size() > most_) visitors.pop_front();
}

std::vector<FrontDoor::Guest> FrontDoor::hear() {
  std::vector<Guest> guests;
  for (std::list<Visitor>* visitors : {&known_, &silent_}) {
    for (auto next = visitors->begin(); next != visitors->end();) {
      const auto visitor = next++;
      const Heard heard = hear(*visitor);
      if (heard == Heard::proven) {
        guests.push_back({std::move(visitor->socket), visitor->handshake.caller()});
      }
      if (heard != Heard::waits) {
        visitors->erase(visitor);
      } else if (visitors == &silent_ && visitor->handshake.caller() >= 0) {
        known_.splice(known_.end(), silent_, visitor);
        drop_oldest_of_too_many(known_);
      }
    }
  }
  return guests;
}

/// Reads what has come, and no more than the handshake: what follows is the guest's.
FrontDoor::Heard FrontDoor::hear(Visitor& visitor) {
  Handshake& handshake = visitor.handshake;
  try {
    while (handshake.state() == Handshake::State::going) {
      std::string some(handshake.wanted(), '\0');
      const size_t came = visitor.socket.receive_some(writable_bytes_of(some));
      if (came == 0) break;
      handshake.take(std::string_view(some).substr(0, came));
      const std::string answer = handshake.take_output();
      // It fits into the buffer of a new connection; who takes less is no rank.
      if (!answer.empty()) send_all(visitor.socket, bytes_of(answer), Deadline(0));
    }
  } catch (const PeerLost&) {
    refuse(visitor, "went away without a proof of the job key: has it another one?");
    return Heard::leaves;
  }
  if (handshake.state() == Handshake::State::proven) return Heard::proven;
  if (handshake.state() == Handshake::State::refused)
    refuse(visitor, "was turned away: " + handshake.why_refused());
  const bool waits = handshake.state() == Handshake::State::going && !visitor.patience.passed();
  return waits ? Heard::waits : Heard::leaves;
}

void FrontDoor::refuse(const Visitor& visitor, const std::string& why) {
  const int rank = visitor.handshake.caller();
  if (rank < 0) return;  // port scanners, browsers, other builds
  last_refused_ = fmt::format("a process that says it is rank {} {}", rank, why);
}

void FrontDoor::add_polls(std::vector<pollfd>& entries, bool accepts) const {
  entries.push_back({accepts ? listener_.fd() : -1, POLLIN, 0});
  for (const std::list<Visitor>* visitors : {&known_, &silent_}) {
    for (const Visitor& visitor : *visitors) entries.push_back({visitor.socket.fd(), POLLIN, 0});
  }
}

Deadline FrontDoor::next_deadline() const {
  Deadline next(kLongest);
  for (const std::list<Visitor>* visitors : {&known_, &silent_}) {
    if (!visitors->empty()) next = earlier(next, visitors->front().patience);
  }
  return next;
}

}  // namespace lockstep
