#pragma once
// What the flight recordings of a job say about each rank, before it is told in words.

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/launch/flight_table.h"

namespace lockstep {

/// Where a rank is.
struct FlightState {
  enum class Is {
    waiting,
    enqueued,
    past,
    idle
  };  // in a call; called, not begun; after one; no call
  Is is = Is::idle;
  FlightEntry call{};         // that one
  int64_t since_ns = 0;       // on the clock of the first rank; 0: never
  std::set<int> waits_for{};  // ranks that have not come to the call it is in
};

/// Two ranks that made different calls at one place.
struct FlightDifference {
  FlightEntry one{}, other{};
  int rank = 0, other_rank = 0;
};

class FlightJob {
 public:
  FlightJob(const std::vector<FlightRank>& ranks, int64_t now_ns);

  int world_size() const { return world_size_; }
  const std::map<int, FlightState>& states() const { return states_; }
  int64_t now_ns() const { return now_ns_; }
  /// Whether all ranks' times are on one clock; and, if that took a correction, by how many calls.
  bool one_clock() const { return one_clock_; }
  size_t aligned_by() const { return aligned_by_; }
  /// The first of the ranks' differing calls, if any differ.
  std::optional<FlightDifference> difference() const;
  /// The rank that gave up first.
  std::optional<int> first_to_give_up() const;
  /// The ranks that are in a call and have not given it up, where others have.
  std::set<int> silent() const;

 private:
  using Place = std::pair<uint64_t, uint64_t>;  // group and number
  /// ns to add to a rank's times; nothing: its clock cannot be compared.
  std::optional<int64_t> correction(const FlightLog& log, const FlightLog& reference);
  FlightState state_of(const FlightLog& log) const;
  std::set<int> missing(int rank, const FlightEntry& call) const;
  bool has_come(int rank, const FlightEntry& call, int waiting) const;

  int world_size_ = 0;
  std::map<int, FlightLog> logs_;  // times on one clock
  std::map<int, FlightState> states_;
  int64_t now_ns_;
  bool one_clock_ = true;
  size_t aligned_by_ = 0;
};

/// Whom a call needs, as far as that fits into 64 bits; of a call of all ranks always.
std::set<int> members_of(const FlightEntry& call, int world_size);

}  // namespace lockstep
