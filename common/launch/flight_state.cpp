#include "common/launch/flight_state.h"

#include <algorithm>

namespace lockstep {
namespace {

using Is = FlightState::Is;

void shift(FlightLog& log, int64_t ns) {
  const auto move = [&](int64_t& time) { time += time != 0 ? ns : 0; };
  for (FlightEntry& entry : log.entries) {
    move(entry.created_ns), move(entry.started_ns), move(entry.completed_ns);
  }
  move(log.gave_up_ns);
}

int64_t last_time(const FlightLog& log) {
  int64_t last = log.gave_up_ns;
  for (const FlightEntry& entry : log.entries) {
    last = std::max({last, entry.created_ns, entry.started_ns, entry.completed_ns});
  }
  return last;
}

bool same_call(const FlightEntry& a, const FlightEntry& b) {
  return a.text == b.text && a.label == b.label;
}

}  // namespace

FlightJob::FlightJob(const std::vector<FlightRank>& ranks, int64_t now_ns) : now_ns_(now_ns) {
  for (const FlightRank& rank : ranks) {
    world_size_ = std::max(world_size_, static_cast<int>(rank.log.header.world_size));
    FlightLog& log = logs_[static_cast<int>(rank.log.header.rank)] = rank.log;
    const std::optional<int64_t> ns = correction(log, ranks.front().log);
    if (ns) shift(log, *ns);
    one_clock_ = one_clock_ && ns;
  }
  for (const auto& [rank, log] : logs_) {
    if (now_ns == 0) now_ns_ = std::max(now_ns_, last_time(log));
    states_[rank] = state_of(log);
  }
  for (auto& [rank, state] : states_) {
    if (state.is == Is::waiting) state.waits_for = missing(rank, state.call);
  }
}

/// A call that ends together ends on all hosts at about the same moment: what the clocks say
/// then is how far they are apart. The median of all such calls leaves out the odd one.
std::optional<int64_t> FlightJob::correction(const FlightLog& log, const FlightLog& reference) {
  if (log.header.host == reference.header.host) return 0;
  std::map<Place, int64_t> ends;
  const auto ended = [](const FlightEntry& entry) {
    return entry.kind == kEndsTogether && entry.group == 0 && entry.completed_ns != 0;
  };
  for (const FlightEntry& entry : reference.entries) {
    if (ended(entry)) ends[{entry.group, entry.number}] = entry.completed_ns;
  }
  std::vector<int64_t> apart;
  for (const FlightEntry& entry : log.entries) {
    const auto other = ends.find({entry.group, entry.number});
    if (ended(entry) && other != ends.end()) apart.push_back(other->second - entry.completed_ns);
  }
  if (apart.empty()) return {};
  aligned_by_ = aligned_by_ == 0 ? apart.size() : std::min(aligned_by_, apart.size());
  const auto middle = apart.begin() + std::ptrdiff_t(apart.size() / 2);
  std::ranges::nth_element(apart, middle);
  return *middle;
}

FlightState FlightJob::state_of(const FlightLog& log) const {
  const auto& calls = log.entries;  // by record
  const auto waiting = std::find_if(calls.rbegin(), calls.rend(), [](const FlightEntry& entry) {
    return entry.started_ns != 0 && entry.completed_ns == 0;
  });
  if (waiting != calls.rend()) return {Is::waiting, *waiting, waiting->started_ns};
  const auto queued = std::ranges::find(calls, 0, &FlightEntry::started_ns);
  if (queued != calls.end()) return {Is::enqueued, *queued, queued->created_ns};
  if (!calls.empty()) return {Is::past, calls.back(), calls.back().completed_ns};
  return {};
}

std::set<int> members_of(const FlightEntry& call, int world_size) {
  std::set<int> members;
  for (int rank = 0; rank < world_size; ++rank) {
    const bool all = call.group == 0 && call.kind != kTransfers;
    if (all || (rank < 64 && (call.members >> rank & 1) == 1)) members.insert(rank);
  }
  return members;
}

std::set<int> FlightJob::missing(int rank, const FlightEntry& call) const {
  std::set<int> absent = members_of(call, world_size_);
  absent.erase(rank);
  std::erase_if(absent, [&](int other) { return has_come(other, call, rank); });
  return absent;
}

/// Whether `rank` has begun the call in which `waiting` waits. A transfer's numbers differ from
/// rank to rank: its peer has come if it is in a transfer with the rank that waits.
bool FlightJob::has_come(int rank, const FlightEntry& call, int waiting) const {
  const auto log = logs_.find(rank);
  if (log == logs_.end()) return false;
  if (call.kind == kTransfers) {
    const FlightState& state = states_.at(rank);
    return state.is == Is::waiting && state.call.kind == kTransfers &&
           members_of(state.call, world_size_).contains(waiting);
  }
  return std::ranges::any_of(log->second.entries, [&](const FlightEntry& entry) {
    return entry.group == call.group && entry.kind != kTransfers && entry.number >= call.number &&
           entry.started_ns != 0;
  });
}

std::optional<FlightDifference> FlightJob::difference() const {
  std::map<Place, std::pair<int, FlightEntry>> first;
  std::optional<FlightDifference> found;
  for (const auto& [rank, log] : logs_) {
    for (const FlightEntry& entry : log.entries) {
      if (entry.kind == kTransfers) continue;
      const auto [place, is_new] =
          first.try_emplace({entry.group, entry.number}, std::pair(rank, entry));
      const auto& [other_rank, other] = place->second;
      if (is_new || same_call(other, entry)) continue;
      if (found && found->other.created_ns <= entry.created_ns) continue;
      found = FlightDifference{other, entry, other_rank, rank};
    }
  }
  return found;
}

std::optional<int> FlightJob::first_to_give_up() const {
  std::optional<int> first;
  for (const auto& [rank, log] : logs_) {
    if (log.gave_up_ns == 0) continue;
    if (!first || log.gave_up_ns < logs_.at(*first).gave_up_ns) first = rank;
  }
  return first;
}

std::set<int> FlightJob::silent() const {
  std::set<int> found;
  for (const auto& [rank, log] : logs_) {
    const bool waits = states_.at(rank).is == Is::waiting;
    if (waits && log.gave_up_ns == 0 && first_to_give_up()) found.insert(rank);
  }
  return found;
}

}  // namespace lockstep
