#include "common/rendezvous/store.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/rendezvous/handshake.h"
#include "common/rendezvous/store_server.h"
#include "common/rendezvous/wire.h"
#include "common/system/secrets.h"

namespace lockstep {

std::string Store::names_of(const std::vector<int>& ranks) const {
  const std::lock_guard lock(naming_);
  return name_ranks(ranks, place_of_);
}

void Store::name_places(PlaceOf place_of) {
  const std::lock_guard lock(naming_);
  place_of_ = std::move(place_of);
}

// --- Some ranks of a job -------------------------------------------------------------------------

SubgroupStore::SubgroupStore(std::shared_ptr<Store> job, std::vector<int> members,
                             const std::string& name)
    : job_(std::move(job)),
      members_(std::move(members)),
      prefix_(name + "/"),
      rank_(int(std::ranges::find(members_, job_->rank()) - members_.begin())) {}

std::vector<int> SubgroupStore::in_job(const std::vector<int>& ranks) const {
  std::vector<int> found;
  for (const int rank : ranks) found.push_back(members_.at(size_t(rank)));
  return found;
}

Meeting SubgroupStore::meet(const std::string& name, const std::optional<std::string>& mine,
                            const std::vector<int>& awaited, double timeout_seconds) {
  const Meeting all = job_->meet(prefix_ + name, mine, in_job(awaited), timeout_seconds);
  Meeting meeting;
  for (const int rank : members_) meeting.texts.push_back(all.texts.at(size_t(rank)));
  for (const int rank : all.gone) {
    const auto member = std::ranges::find(members_, rank);
    if (member != members_.end()) meeting.gone.push_back(int(member - members_.begin()));
  }
  return meeting;
}

void SubgroupStore::set(const std::string& key, const std::string& value) {
  job_->set(prefix_ + key, value);
}

std::string SubgroupStore::get(const std::string& key, double timeout_seconds) {
  return job_->get(prefix_ + key, timeout_seconds);
}

// --- A job's store over TCP ---------------------------------------------------------------------

namespace {

constexpr double kReconnectSeconds = 0.05;

StoreOptions checked(StoreOptions options) {
  require(options.world_size >= 1, "store: the world size is {}, expected 1 or more",
          options.world_size);
  require(0 <= options.rank && options.rank < options.world_size,
          "store: rank {}, expected 0 to {}", options.rank, options.world_size - 1);
  require(options.rank == 0 || options.address.port != 0,
          "store: port 0 on rank {}; only rank 0 may let the system choose", options.rank);
  require(options.run_id.size() <= kLargestHello / 2,
          "store: a run id of {} bytes, expected at most {}", options.run_id.size(),
          kLargestHello / 2);
  return options;
}

/// Nobody gave a key, and all ranks are on this host: rank 0 makes one.
bool is_rank_0s_to_make(const StoreOptions& options) {
  return !options.key.exists() && is_loopback(options.address.host) &&
         proofs_availability().empty();
}

void require_size(const std::string& key, const std::string& value) {
  require(key.size() + value.size() <= kLargestValue,
          "store: key and value of '{}' have {} bytes, expected at most {}", key.substr(0, 80),
          key.size() + value.size(), kLargestValue);
}

/// The payload of one frame, which may have texts of so many ranks.
std::string receive_frame(const Socket& socket, int world_size, const Deadline& deadline) {
  std::string head(kFrameHead, '\0');
  receive_all(socket, writable_bytes_of(head), deadline);
  std::string payload(frame_length(head, kLargestFrame * size_t(world_size)), '\0');
  receive_all(socket, writable_bytes_of(payload), deadline);
  return payload;
}

}  // namespace

StoreOptions store_options(const LaunchContract& contract) {
  return {.address = contract.master,
          .rank = contract.rank,
          .world_size = contract.world_size,
          .run_id = contract.run_id,
          .key = contract.key};
}

TcpStore::TcpStore(const StoreOptions& options)
    : options_(checked(options)), exceptions_(std::uncaught_exceptions()) {
  Store::name_places(options_.place_of);
  if (rank() == 0) {
    if (is_rank_0s_to_make(options_)) options_.key = random_job_key();
    server_ =
        std::make_unique<StoreServer>(options_.address, world_size(), options_.run_id,
                                      options_.answer_seconds, options_.key, options_.place_of);
    options_.address.port = server_->port();
  }
  socket_ = connect();
}

TcpStore::~TcpStore() {
  if (std::uncaught_exceptions() > exceptions_ || !broken_.empty()) return;
  try {
    const Deadline now(0);  // a few bytes, which an idle connection takes at once
    send_all(socket_, bytes_of(frame(encode(Request{.op = Request::Op::leave}))), now);
  } catch (const Error&) {
    // Then the store is already gone.
  }
}

Address TcpStore::local_address() const { return socket_.local_address(); }
Address TcpStore::host_address() const { return socket_.peer_address(); }

std::string TcpStore::name_of_store() const {
  return fmt::format("the store of {} at {}", name_of(0), address().text());
}

void TcpStore::name_places(PlaceOf place_of) {
  Store::name_places(std::move(place_of));
  const std::lock_guard lock(turn_);
  socket_.name_peer(name_of_store());
}

void TcpStore::fail_no_store(const std::string& what) const {
  fail<EnvironmentError>(
      "what listens on {} is no store of Lockstep: {}; another program has the port of rank 0: "
      "give another MASTER_PORT",
      address().text(), what);
}

void TcpStore::fail_closed() const {
  fail<PeerLost>(
      "{}: {} closed the connection before it said what it is: rank 0 has ended, and says why, or "
      "another program has its port: give another MASTER_PORT",
      name_of(rank()), address().text());
}

/// The kernel accepts connections even for a process that is stopped.
void TcpStore::fail_silent(double seconds) const {
  fail<PeerLost>(
      "{}: nobody answers at {}, where rank 0 should be: {:g} s passed; rank 0 stands still or has "
      "no descriptors left (ulimit -n), or another program has its port: look at rank 0, or give "
      "another MASTER_PORT",
      name_of(rank()), address().text(), seconds);
}

/// A connection whose other side has shown that it is the store and takes this rank. Connections
/// that close without a message are tried again: an earlier job on this port may just be ending.
Socket TcpStore::connect() {
  const Deadline deadline(options_.connect_seconds);
  const bool asks_for_key = is_rank_0s_to_make(options_);
  std::optional<Deadline> patience;  // from the first connection on
  while (true) {
    Socket socket = connect_to(address(), deadline);
    socket.name_peer(name_of_store());
    if (!patience) patience = earlier(deadline, Deadline(options_.answer_seconds));
    try {
      if (asks_for_key) options_.key = ask_for_key(socket.peer_address(), rank(), *patience);
      decode_reply(introduce(socket, *patience)).value();
      return socket;
    } catch (const ConnectionClosed&) {
      if (patience->seconds_left() <= kReconnectSeconds) fail_closed();
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(kReconnectSeconds));
  }
}

/// The reply to this rank's introduction.
std::string TcpStore::introduce(Socket& socket, const Deadline& deadline) {
  const Hello hello{.world_size = world_size(), .rank = rank(), .run_id = options_.run_id};
  try {
    prove_to_listener(socket, Handshake::of_caller(key(), kStoreMeeting, 0, rank()), deadline);
    send_all(socket, bytes_of(frame(encode(hello))), deadline);
    return receive_frame(socket, world_size(), deadline);
  } catch (const ConnectionClosed&) {
    throw;
  } catch (const PeerLost&) {
    fail_silent(deadline.seconds());
  } catch (const NotLockstep& error) {
    fail_no_store(error.what());
  }
}

std::string TcpStore::trust() const {
  std::string all;
  if (!key().exists()) all = "no job key: trusts its network";
  if (server_ && interface_of(options_.address.host).empty()) {
    all += fmt::format("{}its store listens on all interfaces", all.empty() ? "" : ", ");
  }
  return all;
}

void TcpStore::answer_within(double seconds) {
  const std::lock_guard lock(turn_);
  options_.answer_seconds = std::min(options_.answer_seconds, seconds);
}

std::string TcpStore::call(const Request& request) {
  const std::lock_guard lock(turn_);
  if (!broken_.empty()) throw PeerLost(broken_);
  const Deadline deadline(request.seconds > 0 ? request.seconds + options_.late_seconds
                                              : options_.answer_seconds);
  std::string reply;
  try {
    send_all(socket_, bytes_of(frame(encode(request))), deadline);
    reply = receive_frame(socket_, world_size(), deadline);
  } catch (const Error& error) {
    broken_ = error.what();  // half a message may be on its way: later messages would be misread
    throw;
  }
  return decode_reply(reply).value();
}

Meeting TcpStore::meet(const std::string& name, const std::optional<std::string>& mine,
                       const std::vector<int>& awaited, double timeout_seconds) {
  if (mine) require_size(name, *mine);
  return decode_meeting(call({.op = Request::Op::meet,
                              .key = name,
                              .value = mine,
                              .awaited = awaited,
                              .seconds = Deadline(timeout_seconds).seconds()}));
}

void TcpStore::set(const std::string& key, const std::string& value) {
  require_size(key, value);
  call({.op = Request::Op::set, .key = key, .value = value});
}

std::string TcpStore::get(const std::string& key, double timeout_seconds) {
  return call({.op = Request::Op::get, .key = key, .seconds = Deadline(timeout_seconds).seconds()});
}

void TcpStore::wait_for_all(double timeout_seconds) {
  call({.op = Request::Op::wait_for_all, .seconds = Deadline(timeout_seconds).seconds()});
}

}  // namespace lockstep
