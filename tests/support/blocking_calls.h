#pragma once
// Plays ranks' calls as if each call kept its rank's host until all the ranks it needs have come.
// The calls are from flight recordings, which have them in the order of the hosts.

#include <fmt/format.h>
#include <cstdint>
#include <string>
#include <vector>

#include "common/launch/flight_table.h"

namespace lockstep::testing {

/// Whether a rank's call is the other side of rank `other`'s.
inline bool belong_together(const FlightEntry& call, const FlightEntry& others, size_t other) {
  if (call.group != others.group || call.kind != others.kind) return false;
  if (call.kind != kTransfers) return call.number == others.number;
  return call.name != others.name && (call.members >> other & 1) == 1;  // a send and its receive
}

/// Plays each rank's calls one after another. Returns "" if all end; else the calls that wait for
/// each other: "rank 0 in all_reduce of 5 f32, sum; rank 1 in ...".
inline std::string where_blocking_calls_stop(const std::vector<FlightRank>& ranks) {
  std::vector<size_t> next(ranks.size(), 0);  // of each rank's calls
  const auto call_of = [&](size_t rank) -> const FlightEntry* {
    const std::vector<FlightEntry>& calls = ranks[rank].log.entries;
    return next[rank] < calls.size() ? &calls[next[rank]] : nullptr;
  };
  const auto all_have_come = [&](size_t rank) {
    const FlightEntry& call = *call_of(rank);
    for (size_t other = 0; other < ranks.size(); ++other) {
      if (other == rank || (call.members >> other & 1) == 0) continue;
      if (!call_of(other) || !belong_together(call, *call_of(other), other)) return false;
    }
    return true;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (!call_of(rank) || !all_have_come(rank)) continue;
      const uint64_t members = call_of(rank)->members | uint64_t{1} << rank;
      for (size_t other = 0; other < ranks.size(); ++other) next[other] += members >> other & 1;
      moved = true;
    }
  }
  std::string stopped;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!call_of(rank)) continue;
    stopped += fmt::format("{}rank {} in {}", stopped.empty() ? "" : "; ", rank,
                           flight_text(call_of(rank)->text));
  }
  return stopped;
}

}  // namespace lockstep::testing
