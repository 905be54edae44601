#pragma once
// What the ranks' last calls tell: their flight recordings side by side, who waits for whom, and
// since when.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/launch/rank_end.h"
#include "common/system/flight_recorder.h"
#include "common/system/shared_memory.h"

namespace lockstep {

/// What is known of a rank at one moment.
struct FlightRank {
  FlightLog log;
  std::string end{};    // "was killed by signal 9 (SIGKILL)"; empty: it runs, or nobody knows
  bool failed = false;  // by itself: it is the cause, whatever the others did
};

/// The table, line by line: a row for all ranks that are at one place, then in a sentence or two
/// who is late, since when, for whom, and where the ranks called different things. `now_ns` is the
/// steady clock's time of that moment; 0: the last time in any recording. Ranks of several hosts
/// are put on one clock by the ends of calls that end together; where there is none, no time is
/// compared and the table says so. Nothing if no rank has recorded a call.
std::vector<std::string> flight_table(std::vector<FlightRank> ranks, int64_t now_ns);

/// Where the ranks of one start leave their last calls, so that the launcher can tell where each
/// was. Memory without a name: it is gone with the last of launcher and ranks.
class FlightMemory {
 public:
  /// Of `ranks` ranks of this node, the first of which has the number `first_rank`. If the system
  /// gives no memory, nothing is recorded.
  FlightMemory(int first_rank, int ranks);

  /// For the ranks to inherit; -1 if there is no memory.
  int descriptor() const { return memory_ ? memory_->descriptor().get() : -1; }
  /// The table of this moment, for ranks of which these have ended, or are stopped, `cause` first
  /// of all.
  std::vector<std::string> table(const std::vector<RankEnd>& ends, const RankEnd& cause) const;
  /// Where that rank of this node said that it is among the others: "data 1, tensor 0"; may be
  /// empty.
  std::string place_of(int rank) const;

 private:
  std::optional<FlightLog> log_of(int local) const;

  int first_rank_, ranks_;
  std::optional<SharedMemory> memory_;
};

/// The recordings that ranks left in `file`, "FILE.rank1", ... Throws BadInput for files that are
/// no recordings or not of one job.
std::vector<FlightRank> read_flight_files(const std::string& file);

}  // namespace lockstep
