#include "common/launch/flight_words.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <optional>

#include "common/core/text.h"

namespace lockstep {
namespace {

using Is = FlightState::Is;

/// "rank 1", "ranks 1, 2".
std::string ranks_text(const std::set<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", listed(ranks));
}

}  // namespace

// --- Single words --------------------------------------------------------------------------------

std::string FlightWords::since(int64_t ns) const {
  if (ns == 0 || !job_.one_clock()) return "-";
  return fmt::format("{:.2f} s", double(std::max<int64_t>(job_.now_ns() - ns, 0)) * 1e-9);
}

/// "13:54:16.120 (10.02 s)", by the clock of the first rank's host.
std::string FlightWords::moment(int64_t ns) const {
  const int64_t wall_ms = (ns + ranks_.front().log.header.wall_minus_steady_ns) / 1000000;
  const auto seconds = static_cast<std::time_t>(wall_ms / 1000);
  tm local{};
  ::localtime_r(&seconds, &local);
  std::array<char, 16> text{};
  std::strftime(text.data(), text.size(), "%H:%M:%S", &local);
  return fmt::format("{}.{:03} ({})", text.data(), wall_ms % 1000, since(ns));
}

std::string FlightWords::call_text(const FlightEntry& call) const {
  const std::string text = flight_text(call.text);
  if (call.group == 0) return text;
  const std::set<int> members = members_of(call, job_.world_size());
  const bool known = call.kind != kTransfers && !members.empty();
  return fmt::format("{}, group of {}", text, known ? ranks_text(members) : "some ranks");
}

/// "call 18 (all_reduce of 5 f32, sum)"
std::string FlightWords::place_text(const FlightEntry& call) const {
  return fmt::format("{} {} ({})", call.kind == kTransfers ? "transfer" : "call", call.number,
                     call_text(call));
}

std::string FlightWords::end_of(int rank) const {
  const auto found = std::ranges::find(
      ranks_, uint64_t(rank), [](const FlightRank& known) { return known.log.header.rank; });
  return found == ranks_.end() ? "" : found->end;
}

// --- The sentences -------------------------------------------------------------------------------

std::set<int> FlightWords::failed() const {
  std::set<int> found;
  for (const FlightRank& rank : ranks_) {
    if (rank.failed) found.insert(static_cast<int>(rank.log.header.rank));
  }
  return found;
}

/// The ranks for which others wait, and which wait for nobody themselves.
std::set<int> FlightWords::late() const {
  std::set<int> found;
  for (const auto& [rank, state] : job_.states())
    found.insert(state.waits_for.begin(), state.waits_for.end());
  std::erase_if(found, [&](int rank) {
    const auto state = job_.states().find(rank);
    return state != job_.states().end() && !state->second.waits_for.empty();
  });
  return found;
}

std::string FlightWords::about_failed(const std::set<int>& ranks) const {
  std::string text;
  for (const int rank : ranks) {
    const FlightState& state = job_.states().at(rank);
    const char* where = state.is == Is::waiting    ? ", in "
                        : state.is == Is::enqueued ? ", before "
                                                   : ", after ";
    text += fmt::format(
        "{}rank {} {}{}", text.empty() ? "" : "; ", rank, end_of(rank),
        state.is == Is::idle ? ", before its first call" : where + place_text(state.call));
  }
  return text;
}

/// The earliest of those who wait for one of `ranks`, in its call.
std::string FlightWords::about_late(const std::set<int>& ranks) const {
  std::set<int> waiting;
  const FlightState* first = nullptr;
  for (const auto& [rank, state] : job_.states()) {
    const bool for_them =
        std::ranges::any_of(state.waits_for, [&](int other) { return ranks.contains(other); });
    if (!for_them) continue;
    waiting.insert(rank);
    if (first == nullptr || state.since_ns < first->since_ns) first = &state;
  }
  const bool one = waiting.size() == 1;
  return fmt::format("{} late: {} {} waited in {}{}{}",
                     ranks_text(ranks) + (ranks.size() == 1 ? " is" : " are"), ranks_text(waiting),
                     one ? "has" : "have", place_text(first->call),
                     job_.one_clock() ? " since " + moment(first->since_ns) : "", doing_of(ranks));
}

/// What the first of them is doing instead.
std::string FlightWords::doing_of(const std::set<int>& ranks) const {
  const int rank = *ranks.begin();
  const auto state = job_.states().find(rank);
  const std::string who = fmt::format("; rank {} ", rank);
  if (state == job_.states().end()) return who + "left no recording here";
  if (!end_of(rank).empty()) return who + end_of(rank);
  switch (state->second.is) {
    case Is::enqueued:
      return who + "has made that call, but its device still does what comes before";
    case Is::waiting:
      return who + "is in " + place_text(state->second.call);
    case Is::past:
      return who + "has not made that call: look at what its host does after " +
             place_text(state->second.call);
    case Is::idle:
      break;
  }
  return who + "has made no call yet";
}

/// Who gave up first, and for whom it waited.
std::string FlightWords::about_reporter(const std::set<int>& causes) const {
  const std::optional<int> reporter = job_.first_to_give_up();
  if (!reporter || causes.contains(*reporter)) return "";
  std::string chain;
  std::set<int> seen;
  for (int rank = *reporter; seen.insert(rank).second && job_.states().contains(rank);) {
    const std::set<int>& next = job_.states().at(rank).waits_for;
    if (next.empty()) break;
    const auto cause =
        std::ranges::find_if(next, [&](int other) { return causes.contains(other); });
    rank = cause != next.end() ? *cause : *next.begin();
    chain += fmt::format("{} waited for rank {}", chain.empty() ? "it" : ", which", rank);
  }
  if (chain.empty()) return "";
  return fmt::format("rank {}, which gave up first, is not the cause: {}", *reporter, chain);
}

std::string FlightWords::about_nobody() const {
  std::set<int> circle;
  for (const auto& [rank, state] : job_.states()) {
    if (!state.waits_for.empty()) circle.insert(rank);
  }
  if (!circle.empty()) {
    return fmt::format(
        "{} wait for each other: different groups' calls, or transfers, in another order",
        ranks_text(circle));
  }
  const std::set<int> silent = job_.silent();
  if (!silent.empty()) {
    return fmt::format(
        "nobody is late, but {} did not give up as the others did: stopped, killed, or stuck in {}",
        ranks_text(silent), place_text(job_.states().at(*silent.begin()).call));
  }
  const bool all_wait = std::ranges::all_of(
      job_.states(), [](const auto& state) { return state.second.is == Is::waiting; });
  return all_wait ? "nobody is late: all ranks have come to their call; look at what connects them"
                  : "nobody is late: no rank waited for another";
}

std::string FlightWords::about_difference(const FlightDifference& difference) const {
  return fmt::format(
      "the calls differ: call {} is {} on rank {}, and {} on rank {}; all ranks must make the same "
      "calls in the same order",
      difference.one.number, call_text(difference.one), difference.rank,
      call_text(difference.other), difference.other_rank);
}

std::string FlightWords::about_clocks() const {
  if (!job_.one_clock()) {
    return "no times: the ranks' hosts have different clocks, and ended no call together";
  }
  if (job_.aligned_by() == 0) return "";
  return fmt::format("times of several hosts, put on one clock by the ends of {} calls",
                     job_.aligned_by());
}

std::vector<std::string> FlightWords::sentences() const {
  if (const auto difference = job_.difference()) {
    return {about_difference(*difference), about_clocks()};
  }
  const std::set<int> broken = failed(), behind = late();
  std::string cause = about_nobody();
  if (!broken.empty()) {
    cause = about_failed(broken);
  } else if (!behind.empty()) {
    cause = about_late(behind);
  }
  return {cause, about_reporter(broken.empty() ? behind : broken), about_clocks()};
}

}  // namespace lockstep
