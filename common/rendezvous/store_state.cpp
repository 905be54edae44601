#include "common/rendezvous/store_state.h"

#include <algorithm>
#include <charconv>

#include "common/core/error.h"
#include "common/rendezvous/rank_names.h"

namespace lockstep {
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
    if (!failure_) give_up(other, what);
  }
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
    case Request::Op::add:
      return add(rank, request);
    case Request::Op::check:
      return answer(rank, {.text = values_.contains(request.key) ? "1" : ""});
    case Request::Op::get:
    case Request::Op::wait_for_all:
      return wait(rank, std::move(request));
    case Request::Op::gone:
      return answer(rank, {.text = encode(gone_)});
    case Request::Op::leave:
      left_.insert(rank);
      gone_.push_back(rank);
      return;
  }
}

void StoreState::set(int rank, const Request& request) {
  values_[request.key] = request.value;
  answer(rank, {});
  answer_getters(request.key);
}

void StoreState::add(int rank, const Request& request) {
  std::string& value = values_[request.key];
  int64_t number = 0, sum = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  const bool whole = error == std::errc{} && end == value.data() + value.size();
  if (!value.empty() && !whole) {
    return answer(rank,
                  bad_input("add({}): its value is no whole number; use another key", request.key));
  }
  if (__builtin_add_overflow(number, request.number, &sum)) {
    return answer(rank, bad_input("add({}, {}): {} is too large for that", request.key,
                                  request.number, number));
  }
  value = std::to_string(sum);
  answer(rank, {.text = value});
  answer_getters(request.key);
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
    return answer(
        rank, late
                  ? peer_lost("no rank set '{}' in the store within {:g} s (asked by "
                              "rank {}){}; see what the others do",
                              key, seconds, rank,
                              left_.empty() ? "" : ", " + name_ranks(left_) + " had left")
                  : peer_lost("{} left without a word: rank {} waits in vain for '{}' in the store",
                              name_ranks(died_), rank, key));
  }
  const std::string advice = trouble_.empty()
                                 ? "were they started, with the same MASTER_ADDR and MASTER_PORT?"
                                 : "rank 0: " + trouble_;
  fail_job(late ? peer_lost("missing ranks: {} (of {}): they did not come within {:g} s; {}",
                            missing_ranks(), world_size_, seconds, advice)
                : peer_lost("{} left without a word before all ranks had come; missing ranks: {}",
                            name_ranks(died_), missing_ranks()),
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

void StoreState::answer_getters(const std::string& key) {
  const std::map<int, Waiting> waiting = waiting_;
  for (const auto& [rank, what] : waiting) {
    if (what.request.op == Request::Op::get && what.request.key == key) {
      answer(rank, {.text = values_.at(key)});
    }
  }
}

void StoreState::expire() {
  tell_host();
  const std::map<int, Waiting> waiting = waiting_;
  for (const auto& [rank, what] : waiting) {
    if (!failure_ && what.deadline.passed()) give_up(rank, what);
  }
}

std::optional<Deadline> StoreState::next_deadline() const {
  std::optional<Deadline> next;
  for (const auto& [rank, waiting] : waiting_) {
    next = next ? earlier(*next, waiting.deadline) : waiting.deadline;
  }
  return next;
}

std::string StoreState::missing_ranks() const {
  std::vector<int> missing;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (!came_.contains(rank)) missing.push_back(rank);
  }
  return listed(missing);
}

}  // namespace lockstep
