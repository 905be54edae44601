#pragma once
// The store's side of the rendezvous, and what ranks and the store say to each other.
//
// First both sides prove the job's key to each other (handshake.h). Frames follow, each behind its
// length. A rank introduces itself by a Hello, which a Reply answers. Then one Reply answers every
// Request, some only after a while. The last request, leave, gets no reply.

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "common/core/text.h"
#include "common/rendezvous/handshake.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/store.h"

namespace lockstep {

// --- The protocol --------------------------------------------------------------------------------

constexpr const char* kStoreMeeting = "store";  // where ranks prove their key to it (handshake.h)
constexpr size_t kLargestValue = size_t{1} << 20;
constexpr size_t kLargestFrame = kLargestValue + 4096;  // of a rank
constexpr size_t kLargestHello = 1024;

struct Hello {
  int world_size = 1;
  int rank = 0;
  std::string run_id{};  // of the job: ranks of another job are turned away
};

struct Request {
  enum class Op : uint8_t { set, get, meet, wait_for_all, leave };
  Op op = Op::get;
  std::string key{};                   // the name of a meeting
  std::optional<std::string> value{};  // of set; what a rank leaves at a meeting
  std::vector<int> awaited{};          // at a meeting
  double seconds = 0;                  // how long get, meet and wait_for_all may take
};

struct Reply {
  enum class Kind : uint8_t { ok, bad_input, peer_lost };
  Kind kind = Kind::ok;
  std::string text{};  // the value, the meeting, or the error
  /// Returns the text of a reply that is ok; throws the error of any other reply.
  std::string value() const;
};

/// Writes the payload of a frame.
std::string encode(const Hello& hello);
std::string encode(const Request& request);
std::string encode(const Reply& reply);
std::string encode(const Meeting& meeting);
/// Throw BadInput for anything that encode() cannot have made.
Hello decode_hello(std::string_view bytes);
Request decode_request(std::string_view bytes);
Reply decode_reply(std::string_view bytes);
Meeting decode_meeting(std::string_view bytes);

/// The length, then the payload.
std::string frame(std::string_view payload);
constexpr size_t kFrameHead = 4;
/// The length in a frame's first bytes. Throws BadInput if it exceeds `most`.
size_t frame_length(std::string_view head, size_t most);

// --- What a store knows --------------------------------------------------------------------------

/// The values, the meetings, the ranks that came and left, and what each rank waits for. Has no
/// sockets: the server passes requests in and answers out.
///
/// A mistake may concern the whole job: a rank claimed twice, another world size, a missing rank.
/// The mistake is the answer to everything from then on, so that every rank learns of it.
/// `start_seconds` after all ranks have come, the job is running. A process that comes then belongs
/// to another job, and only that process is turned away.
class StoreState {
 public:
  static constexpr double kStartSeconds = 10;

  StoreState(int world_size, std::string run_id, double start_seconds = kStartSeconds)
      : world_size_(world_size), run_id_(std::move(run_id)), start_seconds_(start_seconds) {}

  /// Takes a rank's introduction. The process is one of the ranks if the reply is ok.
  Reply join(const Hello& hello);
  /// Notes that a rank's connection is closed. If the rank did not take its leave before, it has
  /// died. Every rank that waits, or will wait, for something missing gets that as its answer.
  void disconnect(int rank);
  /// Takes a request of a rank that has joined; take_answers() gives the reply, now or later.
  /// Throws BadInput if the rank still waits for the reply to another request.
  void handle(int rank, Request request);

  /// Sets each rank's place among the others, "data 1, tensor 1", for errors that name ranks.
  void name_places(PlaceOf place_of) { place_of_ = std::move(place_of); }
  /// Notes what keeps ranks from coming, "Too many open files", for the error that names the ranks.
  void cannot_accept(const std::string& why) { trouble_ = why; }
  /// Answers the ranks that have waited long enough.
  void expire();
  /// When to call expire() next; nullopt if no rank waits.
  std::optional<Deadline> next_deadline() const;
  /// Takes the answers that have to be sent, in this order.
  std::vector<std::pair<int, Reply>> take_answers() { return std::exchange(answers_, {}); }

 private:
  struct Waiting {
    Request request;
    Deadline deadline;
  };
  std::optional<Reply> refuse(const Hello& hello) const;
  void answer(int rank, Reply reply);
  void set(int rank, const Request& request);
  void meet(int rank, Request request);
  void answer_meetings();
  bool is_over(const Waiting& meeting) const;
  void wait(int rank, Request request);
  void give_up(int rank, const Waiting& waiting);
  void fail_job(Reply failure, double farewell_seconds);
  void tell_host();
  bool all_know() const;
  bool all_came() const { return static_cast<int>(came_.size()) == world_size_; }
  std::string missing_ranks() const;
  std::string number_and_place(int rank) const;
  std::string names_of(const std::set<int>& ranks) const { return name_ranks(ranks, place_of_); }

  int world_size_;
  std::string run_id_;
  double start_seconds_;
  PlaceOf place_of_{};
  std::optional<Deadline> start_;  // until then a process may be this job's by mistake
  std::map<std::string, std::string> values_;
  std::map<std::string, std::map<int, std::string>> meetings_;  // texts by rank
  std::set<int> came_, left_, died_;
  std::vector<int> gone_;           // the ranks that left or died, in that order
  std::map<int, Waiting> waiting_;  // by rank
  std::vector<std::pair<int, Reply>> answers_;

  std::string trouble_;           // why nobody could be accepted
  std::optional<Reply> failure_;  // of the whole job
  std::set<int> told_;            // ranks that know of it, or are gone
  size_t expected_ = 0;           // the largest world size that any rank gave
  Deadline farewell_{0};          // when rank 0 learns of it at the latest
};

// --- The server ----------------------------------------------------------------------------------

/// The interface on which a store listens: `host` itself if it is a loopback address, or in numbers
/// an own address of this host. Else "", all interfaces: a host's name often means one address on
/// the host and another elsewhere. Behind NAT or a Kubernetes service no interface has the address.
std::string interface_of(const std::string& host);

/// One thread in rank 0's process that serves all ranks. A connection that is not from a rank (a
/// port scanner, a browser, half a message, silence) is dropped; the ranks do not notice. A rank
/// whose connection closes before it said leave has died.
class StoreServer {
 public:
  /// Listens on a port of `address`, at its interface_of(), and starts to serve. Drops a connection
  /// that has not proven `key`, or not introduced itself, after `introduction_seconds`.
  /// If only this host is served, ranks without a key can ask for the key (KeyDesk).
  /// `place_of` is as for StoreState::name_places(). Throws EnvironmentError, at once, if the port
  /// is taken.
  StoreServer(const Address& address, int world_size, std::string run_id,
              double introduction_seconds, const JobKey& key = {}, PlaceOf place_of = {});
  /// Closes all connections within milliseconds.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// The port on which the store listens.
  int port() const { return port_; }

 private:
  struct Connection;

  void run();
  void wait_for_events();
  Deadline next_deadline() const;
  void accept_some();
  void let_in();
  void drop_oldest_stranger();
  void serve(Connection& connection);
  void introduce(Connection& connection);
  void handle_requests(Connection& connection);
  void drop(Connection& connection);
  void deliver_answers();
  void send(int rank, const Reply& reply);
  bool answers_are_under_way() const;
  void drop_late_strangers();

  size_t most_strangers_;
  double introduction_seconds_;
  Socket listener_;
  int port_;
  std::optional<KeyDesk> desk_;
  FrontDoor door_;
  StoreState state_;
  std::list<Connection> connections_;  // in the order in which they came
  Deadline accept_again_{0};           // when the system may again have room for connections
  std::optional<Reply> for_host_;      // rank 0's answer, and until when it may be held back
  Deadline host_waits_{0};
  WakeUp wake_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;  // last: it uses all the others
};

}  // namespace lockstep
