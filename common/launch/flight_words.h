#pragma once
// Words for what flight recordings say: times, calls, and the sentences below the table.

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "common/launch/flight_state.h"

namespace lockstep {

class FlightWords {
 public:
  /// `ranks` and `job` must outlive it.
  FlightWords(const std::vector<FlightRank>& ranks, const FlightJob& job)
      : ranks_(ranks), job_(job) {}

  /// How long ago: "10.02 s"; "-" where that cannot be said.
  std::string since(int64_t ns) const;
  /// "all_reduce of 5 f32, sum, group of ranks 1, 2"
  std::string call_text(const FlightEntry& call) const;
  /// How a rank ended; empty if it has not.
  std::string end_of(int rank) const;
  /// Who is the cause, who was blamed without being it, and what about the clocks.
  std::vector<std::string> sentences() const;

 private:
  std::string moment(int64_t ns) const;
  std::string place_text(const FlightEntry& call) const;
  std::set<int> failed() const;
  std::set<int> late() const;
  std::string about_failed(const std::set<int>& ranks) const;
  std::string about_late(const std::set<int>& ranks) const;
  std::string doing_of(const std::set<int>& ranks) const;
  std::string about_reporter(const std::set<int>& causes) const;
  std::string about_nobody() const;
  std::string about_difference(const FlightDifference& difference) const;
  std::string about_clocks() const;

  const std::vector<FlightRank>& ranks_;
  const FlightJob& job_;
};

}  // namespace lockstep
