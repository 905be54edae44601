#include "common/rendezvous/store_server.h"

#include <signal.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/wire.h"

namespace lockstep {

// --- The protocol --------------------------------------------------------------------------------

namespace {

constexpr double kTicksPerSecond = 1e6;

void require_end(const WireReader& in, const char* what) {
  require(in.at_end(), "{}: bytes after its end", what);
}

int small_number(WireReader& in, const char* what) {
  const uint64_t value = in.number(4);
  require(value <= uint64_t{std::numeric_limits<int>::max()}, "{}: {} is too large", what, value);
  return static_cast<int>(value);
}

void put_optional(std::string& out, const std::optional<std::string>& text) {
  put_number(out, text ? 1 : 0, 1);
  if (text) put_text(out, *text);
}

std::optional<std::string> optional_text(WireReader& in) {
  if (in.number(1) == 0) return std::nullopt;
  return in.text();
}

void put_ranks(std::string& out, const std::vector<int>& ranks) {
  put_number(out, ranks.size(), 4);
  for (const int rank : ranks) put_number(out, static_cast<uint64_t>(rank), 4);
}

std::vector<int> ranks_in(WireReader& in, const char* what) {
  std::vector<int> found;
  for (int left = small_number(in, what); left > 0; --left) {
    found.push_back(small_number(in, what));
  }
  return found;
}

}  // namespace

std::string Reply::value() const {
  if (kind == Kind::bad_input) throw BadInput(text);
  if (kind == Kind::peer_lost) throw PeerLost(text);
  return text;
}

std::string encode(const Hello& hello) {
  std::string out;
  put_number(out, static_cast<uint64_t>(hello.world_size), 4);
  put_number(out, static_cast<uint64_t>(hello.rank), 4);
  put_text(out, hello.run_id);
  return out;
}

Hello decode_hello(std::string_view bytes) {
  WireReader in(bytes);
  Hello hello;
  hello.world_size = small_number(in, "world size");
  hello.rank = small_number(in, "rank");
  hello.run_id = in.text();
  require_end(in, "hello");
  return hello;
}

std::string encode(const Request& request) {
  std::string out;
  put_number(out, static_cast<uint64_t>(request.op), 1);
  put_text(out, request.key);
  put_optional(out, request.value);
  put_ranks(out, request.awaited);
  put_number(out, static_cast<uint64_t>(std::llround(request.seconds * kTicksPerSecond)), 8);
  return out;
}

Request decode_request(std::string_view bytes) {
  WireReader in(bytes);
  const uint64_t op = in.number(1);
  require(op <= uint64_t(Request::Op::leave), "request: unknown operation {}", op);
  Request request{.op = static_cast<Request::Op>(op)};
  request.key = in.text();
  request.value = optional_text(in);
  request.awaited = ranks_in(in, "request");
  request.seconds = static_cast<double>(in.number(8)) / kTicksPerSecond;
  require_end(in, "request");
  return request;
}

std::string encode(const Reply& reply) {
  std::string out;
  put_number(out, static_cast<uint64_t>(reply.kind), 1);
  put_text(out, reply.text);
  return out;
}

Reply decode_reply(std::string_view bytes) {
  WireReader in(bytes);
  const uint64_t kind = in.number(1);
  require(kind <= uint64_t(Reply::Kind::peer_lost), "reply: unknown kind {}", kind);
  Reply reply{.kind = static_cast<Reply::Kind>(kind), .text = in.text()};
  require_end(in, "reply");
  return reply;
}

std::string encode(const Meeting& meeting) {
  std::string out;
  put_number(out, meeting.texts.size(), 4);
  for (const std::optional<std::string>& text : meeting.texts) put_optional(out, text);
  put_ranks(out, meeting.gone);
  return out;
}

Meeting decode_meeting(std::string_view bytes) {
  WireReader in(bytes);
  Meeting meeting;
  for (int left = small_number(in, "world size"); left > 0; --left) {
    meeting.texts.push_back(optional_text(in));
  }
  meeting.gone = ranks_in(in, "meeting");
  require_end(in, "meeting");
  return meeting;
}

std::string frame(std::string_view payload) {
  std::string out;
  put_text(out, payload);
  return out;
}

size_t frame_length(std::string_view head, size_t most) {
  const uint64_t length = WireReader(head).number(kFrameHead);
  require(length <= most, "a frame of {} bytes, expected at most {}", length, most);
  return length;
}

// --- What a store knows --------------------------------------------------------------------------

namespace {

/// How long the store waits for ranks that do not know yet: ranks of one job start within seconds.
constexpr double kFarewellSeconds = 1;

template <class... Args>
Reply bad_input(fmt::format_string<Args...> format, Args&&... args) {
  return {Reply::Kind::bad_input, fmt::format(format, std::forward<Args>(args)...)};
}

template <class... Args>
Reply peer_lost(fmt::format_string<Args...> format, Args&&... args) {
  return {Reply::Kind::peer_lost, fmt::format(format, std::forward<Args>(args)...)};
}

}  // namespace

Reply StoreState::join(const Hello& hello) {
  const int rank = hello.rank;
  if (std::optional<Reply> refusal = refuse(hello)) return *refusal;
  expected_ = std::max({expected_, size_t(world_size_), size_t(hello.world_size)});
  const bool came_before = came_.contains(rank);
  if (hello.world_size != world_size_) {
    fail_job(bad_input("WORLD_SIZE is {} on rank 0 but {} on rank {}; give all ranks the same",
                       world_size_, hello.world_size, rank),
             kFarewellSeconds);
  } else if (came_before) {
    fail_job(
        bad_input("rank {} claimed twice{}; give every process a RANK of its own", rank,
                  died_.contains(rank) || left_.contains(rank) ? " (the first one is gone)" : ""),
        kFarewellSeconds);
  }
  if (failure_ && (rank != 0 || came_before)) {
    if (!came_before) told_.insert(rank);
    tell_host();
    return *failure_;
  }
  // Rank 0 joins even so, and learns of a failure in the answer to its first question: as the last
  // rank.
  came_.insert(rank);
  if (all_came()) start_ = Deadline(start_seconds_);
  for (int other = world_size_ - 1; all_came() && other >= 0; --other) {  // rank 0 last
    const auto waiting = waiting_.find(other);
    if (waiting != waiting_.end() && waiting->second.request.op == Request::Op::wait_for_all) {
      answer(other, {});
    }
  }
  return {};
}

/// The reason to turn away one process, if it does not concern the whole job.
std::optional<Reply> StoreState::refuse(const Hello& hello) const {
  if (hello.run_id != run_id_) {
    return bad_input(  // without the ids: who reads this may be anybody
        "the store belongs to another job: its run id (TORCHELASTIC_RUN_ID) is not that of rank "
        "{}; "
        "give another MASTER_PORT",
        hello.rank);
  }
  if (start_ && start_->passed()) {
    return bad_input(
        "rank {} of {}: the job at this address has had all of its {} ranks for a while, and runs; "
        "give the other job another MASTER_PORT",
        hello.rank, hello.world_size, world_size_);
  }
  if (hello.world_size == world_size_ && hello.rank >= world_size_) {
    return bad_input("rank {} in a world of {}, expected 0 to {}", hello.rank, world_size_,
                     world_size_ - 1);
  }
  return std::nullopt;
}

void StoreState::disconnect(int rank) {
  waiting_.erase(rank);
  told_.insert(rank);
  tell_host();
  if (left_.contains(rank)) return;
  died_.insert(rank);
  gone_.push_back(rank);
  const std::map<int, Waiting> waiting = waiting_;
  for (const auto& [other, what] : waiting) {
    if (!failure_ && what.request.op != Request::Op::meet) give_up(other, what);
  }
  answer_meetings();
}

void StoreState::handle(int rank, Request request) {
  if (waiting_.contains(rank)) {
    fail<BadInput>("rank {} asks before its last question is answered", rank);
  }
  if (failure_) {
    waiting_.emplace(rank, Waiting{std::move(request), farewell_});
    if (rank != 0) answer(rank, *failure_);
    return tell_host();
  }
  switch (request.op) {
    case Request::Op::set:
      return set(rank, request);
    case Request::Op::meet:
      return meet(rank, std::move(request));
    case Request::Op::get:
    case Request::Op::wait_for_all:
      return wait(rank, std::move(request));
    case Request::Op::leave:
      left_.insert(rank);
      gone_.push_back(rank);
      return answer_meetings();
  }
}

void StoreState::set(int rank, const Request& request) {
  values_[request.key] = request.value.value_or("");
  answer(rank, {});
  const std::map<int, Waiting> waiting = waiting_;
  for (const auto& [other, what] : waiting) {
    if (what.request.op == Request::Op::get && what.request.key == request.key) {
      answer(other, {.text = values_.at(request.key)});
    }
  }
}

void StoreState::meet(int rank, Request request) {
  if (request.value) meetings_[request.key][rank] = *std::exchange(request.value, {});
  const Deadline deadline(request.seconds);
  waiting_.emplace(rank, Waiting{std::move(request), deadline});
  answer_meetings();
}

/// The answer to rank 0 comes last: its process may end then, and the store with it.
void StoreState::answer_meetings() {
  if (failure_) return;
  for (int rank = world_size_ - 1; rank >= 0; --rank) {
    const auto found = waiting_.find(rank);
    if (found == waiting_.end() || found->second.request.op != Request::Op::meet) continue;
    if (!is_over(found->second)) continue;
    Meeting meeting{.texts = {size_t(world_size_), std::nullopt}, .gone = gone_};
    const auto left = meetings_.find(found->second.request.key);
    if (left != meetings_.end()) {
      for (const auto& [other, text] : left->second) meeting.texts[size_t(other)] = text;
    }
    answer(rank, {.text = encode(meeting)});
  }
}

/// All are there, or one of them will not come, or it has taken too long.
bool StoreState::is_over(const Waiting& meeting) const {
  if (meeting.deadline.passed()) return true;
  const std::vector<int>& awaited = meeting.request.awaited;
  const auto is_gone = [&](int rank) { return left_.contains(rank) || died_.contains(rank); };
  if (!gone_.empty() && std::ranges::any_of(awaited, is_gone)) return true;
  const auto left = meetings_.find(meeting.request.key);
  if (left == meetings_.end() || left->second.size() < awaited.size()) return awaited.empty();
  return std::ranges::all_of(awaited, [&](int rank) { return left->second.contains(rank); });
}

void StoreState::wait(int rank, Request request) {
  if (request.op == Request::Op::wait_for_all && all_came()) return answer(rank, {});
  const auto value = values_.find(request.key);
  if (request.op == Request::Op::get && value != values_.end()) {
    return answer(rank, {.text = value->second});
  }
  const Deadline deadline(request.seconds);
  const Waiting waiting{std::move(request), deadline};
  waiting_.emplace(rank, waiting);
  if (!died_.empty() || waiting.deadline.passed()) give_up(rank, waiting);
}

/// Answers a rank that waits in vain: its deadline has passed, or a rank has left.
void StoreState::give_up(int rank, const Waiting& waiting) {
  const std::string& key = waiting.request.key;
  const double seconds = waiting.deadline.seconds();
  const bool late = died_.empty();
  if (waiting.request.op == Request::Op::get) {
    return answer(rank,
                  late ? peer_lost("no rank set '{}' in the store within {:g} s (asked by "
                                   "{}){}; see what the others do",
                                   key, seconds, names_of({rank}),
                                   left_.empty() ? "" : ", " + names_of(left_) + " had left")
                       : peer_lost("{} left without a word: {} waits in vain for '{}' in the store",
                                   names_of(died_), names_of({rank}), key));
  }
  const std::string advice = trouble_.empty()
                                 ? "were they started, with the same MASTER_ADDR and MASTER_PORT?"
                                 : "rank 0: " + trouble_;
  fail_job(late ? peer_lost("missing ranks: {} (of {}): they did not come within {:g} s; {}",
                            missing_ranks(), world_size_, seconds, advice)
                : peer_lost("{} left without a word before all ranks had come; missing ranks: {}",
                            names_of(died_), missing_ranks()),
           /*farewell_seconds=*/0);
}

/// From here on `failure` is the answer to everything. Rank 0 is told last, since its process may
/// end then, and the store with it: when all others know, or after `farewell_seconds`.
void StoreState::fail_job(Reply failure, double farewell_seconds) {
  if (failure_) return;
  failure_ = std::move(failure);
  farewell_ = Deadline(farewell_seconds);
  const std::map<int, Waiting> waiting = waiting_;
  for (const auto& [rank, what] : waiting) {
    if (rank != 0) answer(rank, *failure_);
  }
  if (waiting_.contains(0)) waiting_.at(0).deadline = farewell_;
  tell_host();
}

void StoreState::tell_host() {
  if (failure_ && waiting_.contains(0) && (all_know() || farewell_.passed())) answer(0, *failure_);
}

/// True if all ranks but 0 know of the failure, including those that have not come.
bool StoreState::all_know() const { return told_.size() - told_.count(0) + 1 >= expected_; }

void StoreState::answer(int rank, Reply reply) {
  waiting_.erase(rank);
  if (failure_) told_.insert(rank);
  answers_.emplace_back(rank, std::move(reply));
}

void StoreState::expire() {
  tell_host();
  const std::map<int, Waiting> waiting = waiting_;
  for (const auto& [rank, what] : waiting) {
    const bool waits = what.request.op != Request::Op::meet;
    if (!failure_ && waits && what.deadline.passed()) give_up(rank, what);
  }
  answer_meetings();
}

std::optional<Deadline> StoreState::next_deadline() const {
  std::optional<Deadline> next;
  for (const auto& [rank, waiting] : waiting_) {
    next = next ? earlier(*next, waiting.deadline) : waiting.deadline;
  }
  return next;
}

std::string StoreState::missing_ranks() const {
  std::vector<std::string> missing;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (!came_.contains(rank)) missing.push_back(number_and_place(rank));
  }
  return listed(missing);
}

/// "3", or "3 (data 1, tensor 1)".
std::string StoreState::number_and_place(int rank) const {
  const std::string place = place_of_ ? place_of_(rank) : "";
  return place.empty() ? std::to_string(rank) : fmt::format("{} ({})", rank, place);
}

// --- The server ----------------------------------------------------------------------------------

namespace {

constexpr double kAcceptPauseSeconds = 0.1;
constexpr double kHostWaits = 1;  // seconds, for answers to ranks that do not read them
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

/// Takes the first frame out of the bytes received; nullopt if it is not complete. Throws BadInput
/// if it is longer than `most`.
std::optional<std::string> take_frame(std::string& bytes, size_t most) {
  if (bytes.size() < kFrameHead) return std::nullopt;
  const size_t length = frame_length(bytes, most);
  if (bytes.size() < kFrameHead + length) return std::nullopt;
  std::string payload = bytes.substr(kFrameHead, length);
  bytes.erase(0, kFrameHead + length);
  return payload;
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
                         double introduction_seconds, const JobKey& key, PlaceOf place_of)
    : most_strangers_(kMostUnannounced + static_cast<size_t>(world_size)),
      introduction_seconds_(introduction_seconds),
      listener_(listen_on({interface_of(address.host), address.port})),
      port_(listener_.local_address().port),
      desk_(desk_at(listener_, key)),
      door_(listener_, key, kStoreMeeting, 0, world_size, introduction_seconds),
      state_(world_size, std::move(run_id)) {
  state_.name_places(std::move(place_of));
  thread_ = std::thread([this] { run(); });
}

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
  if (for_host_) next = earlier(next, host_waits_);
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

/// Rank 0 gets its answer when the others' are on their way, as its process may end then.
void StoreServer::deliver_answers() {
  for (auto answers = state_.take_answers(); !answers.empty(); answers = state_.take_answers()) {
    for (auto& [rank, reply] : answers) {
      if (rank > 0) {
        send(rank, reply);
      } else {
        for_host_ = std::move(reply);
        host_waits_ = Deadline(kHostWaits);
      }
    }
  }
  if (!for_host_ || (answers_are_under_way() && !host_waits_.passed())) return;
  send(0, *std::exchange(for_host_, {}));
  deliver_answers();  // of a rank 0 that is gone the others have to hear
}

void StoreServer::send(int rank, const Reply& reply) {
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

bool StoreServer::answers_are_under_way() const {
  return std::ranges::any_of(connections_, [](const Connection& connection) {
    return connection.rank > 0 && connection.socket.is_open() && !connection.out.empty();
  });
}

void StoreServer::drop_late_strangers() {
  for (Connection& connection : connections_) {
    if (connection.is_stranger() && connection.introduction.passed()) drop(connection);
  }
}

}  // namespace lockstep
