#pragma once
// What a store knows: keys with values, which ranks came and left, and which rank waits for what.
// No sockets: the server (store_server.h) passes requests in and answers out.

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/rendezvous/store_protocol.h"
#include "common/sockets/deadline.h"

namespace lockstep {

/// A mistake that concerns the whole job (a rank claimed twice, another world size, a rank that did
/// not come) is the answer to everything from then on, so that every rank learns of it.
/// `start_seconds` after all ranks have come, the job is running: a process that comes then belongs
/// to another job, and only that process is turned away.
class StoreState {
 public:
  static constexpr double kStartSeconds = 10;

  StoreState(int world_size, std::string run_id, double start_seconds = kStartSeconds)
      : world_size_(world_size), run_id_(std::move(run_id)), start_seconds_(start_seconds) {}

  /// A rank introduces itself; it is one of the ranks if the reply is ok.
  Reply join(const Hello& hello);
  /// A rank's connection is closed. If the rank did not take its leave before, its process has
  /// died: every rank that waits, or will wait, for something missing gets that as its answer.
  void disconnect(int rank);
  /// A request of a rank that has joined; take_answers() gives the reply, now or later. Throws
  /// BadInput if the rank still waits for the reply to another request.
  void handle(int rank, Request request);

  /// What keeps ranks from coming, for the error that names them: "Too many open files".
  void cannot_accept(const std::string& why) { trouble_ = why; }
  /// Answers the ranks that have waited long enough.
  void expire();
  /// When to call expire() next; nullopt if no rank waits.
  std::optional<Deadline> next_deadline() const;
  /// What has to be sent, in this order.
  std::vector<std::pair<int, Reply>> take_answers() { return std::exchange(answers_, {}); }

 private:
  struct Waiting {
    Request request;
    Deadline deadline;
  };
  std::optional<Reply> refuse(const Hello& hello) const;
  void answer(int rank, Reply reply);
  void answer_getters(const std::string& key);
  void set(int rank, const Request& request);
  void add(int rank, const Request& request);
  void wait(int rank, Request request);
  void give_up(int rank, const Waiting& waiting);
  void fail_job(Reply failure, double farewell_seconds);
  void tell_host();
  bool all_know() const;
  bool all_came() const { return static_cast<int>(came_.size()) == world_size_; }
  std::string missing_ranks() const;

  int world_size_;
  std::string run_id_;
  double start_seconds_;
  std::optional<Deadline> start_;  // until then a process may be this job's by mistake
  std::map<std::string, std::string> values_;
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

}  // namespace lockstep
