#include "common/rendezvous/handshake.h"

#include <limits>

#include "common/core/error.h"
#include "common/sockets/transfer.h"
#include "common/sockets/wire.h"
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

}  // namespace lockstep
