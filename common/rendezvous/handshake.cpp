#include "common/rendezvous/handshake.h"

#include <limits>

#include "common/core/error.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/wire.h"
#include "common/system/secrets.h"

namespace lockstep {
namespace {

constexpr size_t kHead = kHandshakeMagic.size() + 4;  // magic, version
constexpr size_t kFirst = kHead + 1 + 4 + kNonceBytes;
constexpr size_t kAnswer = kHead + 1 + kNonceBytes + kProofBytes;
constexpr std::string_view kCaller = "caller", kListener = "listener";
constexpr const char* kGiveAllTheSame =
    "give all ranks of a job the same LOCKSTEP_JOB_SECRET, and another job another MASTER_PORT";

std::string head(const JobKey& key) {
  std::string out(kHandshakeMagic);
  put_number(out, kHandshakeVersion, 4);
  put_number(out, static_cast<uint64_t>(key.source), 1);
  return out;
}

}  // namespace

Handshake::Handshake(const JobKey& key, bool calls, const std::string& where, int listener,
                     int caller)
    : key_(key), calls_(calls), where_(where), listener_(listener), caller_(caller) {
  if (calls) callers_nonce_ = new_nonce();
}

Handshake Handshake::of_caller(const JobKey& key, const std::string& where, int listener,
                               int caller) {
  Handshake made(key, true, where, listener, caller);
  made.out_ = head(key);
  put_number(made.out_, static_cast<uint64_t>(caller), 4);
  made.out_ += made.callers_nonce_;
  return made;
}

Handshake Handshake::of_listener(const JobKey& key, const std::string& where, int listener) {
  return {key, false, where, listener, -1};
}

std::string Handshake::new_nonce() const {
  return key_.exists() ? random_bytes(kNonceBytes) : std::string(kNonceBytes, '\0');
}

size_t Handshake::message_size() const {
  if (calls_) return kAnswer;
  return caller_ < 0 ? kFirst : kProofBytes;
}

/// The head first: another protocol, or another version of this one, may never send the rest.
size_t Handshake::wanted() const {
  if (state_ != State::going) return 0;
  return (has_head() && in_.size() < kHead ? kHead : message_size()) - in_.size();
}

void Handshake::take(std::string_view bytes) {
  in_ += bytes;
  if (has_head() && !take_head()) return;
  if (in_.size() < message_size()) return;
  if (calls_) return take_answer();
  caller_ < 0 ? take_first_message() : take_proof();
}

/// False if there is nothing more to do with what came.
bool Handshake::take_head() {
  const auto begin = std::string_view(in_).substr(0, kHandshakeMagic.size());
  if (!kHandshakeMagic.starts_with(begin)) {
    if (calls_) fail<NotLockstep>("it speaks another protocol");
    refuse("");
  }
  if (state_ != State::going || in_.size() < kHead) return false;
  const uint64_t version = WireReader(std::string_view(in_).substr(begin.size())).number(4);
  if (version == kHandshakeVersion) return true;
  if (calls_) {
    fail<BadInput>(
        "rank {} speaks version {} of the protocol between ranks, this rank version {}; run the "
        "same build of Lockstep everywhere",
        listener_, version, kHandshakeVersion);
  }
  listeners_nonce_.resize(kNonceBytes);
  answer("");
  refuse(fmt::format("it speaks version {} of the protocol between ranks", version));
  return false;
}

void Handshake::take_first_message() {
  WireReader in(std::string_view(in_).substr(kHead));
  const auto source = static_cast<JobKey::Source>(in.number(1));
  const uint64_t rank = in.number(4);
  callers_nonce_ = in_.substr(kFirst - kNonceBytes);
  listeners_nonce_ = new_nonce();
  in_.clear();
  if (rank > uint64_t{std::numeric_limits<int>::max()}) return refuse("its rank is no number");
  caller_ = static_cast<int>(rank);
  if (source == key_.source) return answer(proof_of(kListener));
  answer("");
  refuse("it has " + describe(source));
}

/// The listener's answer to the first message: without a proof it is a refusal.
void Handshake::answer(const std::string& proof) {
  out_ = head(key_) + listeners_nonce_ + proof;
  out_.resize(kAnswer, '\0');
}

void Handshake::take_answer() {
  const auto source =
      static_cast<JobKey::Source>(WireReader(std::string_view(in_).substr(kHead)).number(1));
  if (source != key_.source) {
    fail<BadInput>("rank {} has {}, this rank {} has {}; {}", listener_, describe(source), caller_,
                   describe(key_.source), kGiveAllTheSame);
  }
  listeners_nonce_ = in_.substr(kHead + 1, kNonceBytes);
  if (!proves(std::string_view(in_).substr(kAnswer - kProofBytes), kListener)) {
    fail<BadInput>("rank {} has {}, and this rank {} another one; {}", listener_, describe(source),
                   caller_, kGiveAllTheSame);
  }
  out_ = proof_of(kCaller);
  state_ = State::proven;
}

void Handshake::take_proof() {
  if (!proves(in_, kCaller)) return refuse(fmt::format("it has not {}", describe(key_.source)));
  state_ = State::proven;
}

void Handshake::refuse(const std::string& why) {
  state_ = State::refused;
  why_refused_ = why;
}

std::string Handshake::proof_of(std::string_view side) const {
  if (!key_.exists()) return std::string(kProofBytes, '\0');
  std::string message;
  for (const std::string_view text : {kHandshakeMagic, side, std::string_view(where_)}) {
    put_text(message, text);
  }
  for (const int rank : {listener_, caller_}) put_number(message, static_cast<uint64_t>(rank), 4);
  return hmac(key_.bytes, message + callers_nonce_ + listeners_nonce_);
}

bool Handshake::proves(std::string_view proof, std::string_view side) const {
  return !key_.exists() || same_secret(proof, proof_of(side));
}

void prove_to_listener(const Socket& socket, Handshake handshake, const Deadline& deadline) {
  send_all(socket, bytes_of(handshake.take_output()), deadline);
  while (handshake.state() == Handshake::State::going) {
    std::string some(handshake.wanted(), '\0');
    receive_all(socket, writable_bytes_of(some), deadline);
    handshake.take(some);
  }
  send_all(socket, bytes_of(handshake.take_output()), deadline);
}

// --- The front door ------------------------------------------------------------------------------

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
