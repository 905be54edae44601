#pragma once
// The table of the ranks' last calls: their flight recordings side by side, who waits for whom, and
// since when.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/launch/rank_end.h"
#include "common/system/flight_recorder.h"
#include "common/system/shared_memory.h"

namespace lockstep {

/// The facts that are known of a rank at one moment.
struct FlightRank {
  FlightLog log;
  std::string end{};    // "was killed by signal 9 (SIGKILL)"; empty: it runs, or nobody knows
  bool failed = false;  // by itself: it is the cause, whatever the others did
};

/// Makes the table, line by line: one row for all ranks that are at the same place. Then a sentence
/// or two say who is late, since when, for whom, and where the ranks' calls differ. `now_ns` is the
/// steady clock's time of that moment; 0: the last time in any recording. Ranks of several hosts
/// are put on one clock by the ends of calls that end together. If there is no such call, no time
/// is compared, and the table says so. Empty if no rank has recorded a call.
std::vector<std::string> flight_table(std::vector<FlightRank> ranks, int64_t now_ns);

/// The memory where the ranks of one start leave their last calls, so that the launcher can tell
/// where each rank was. The memory has no name: it is gone with the last of launcher and ranks.
class FlightMemory {
 public:
  /// Makes the memory for `ranks` ranks of this node. The first of them has number `first_rank`.
  /// If the system gives no memory, nothing is recorded.
  FlightMemory(int first_rank, int ranks);

  /// The descriptor that the ranks inherit; -1 if there is no memory.
  int descriptor() const { return memory_ ? memory_->descriptor().get() : -1; }
  /// The table of this moment. `ends` are the ranks that have ended; `cause` is the end that caused
  /// the others, or a stopped rank.
  std::vector<std::string> table(const std::vector<RankEnd>& ends, const RankEnd& cause) const;
  /// The place among the others that this rank of this node has told: "data 1, tensor 0"; may be
  /// empty.
  std::string place_of(int rank) const;

 private:
  std::optional<FlightLog> log_of(int local) const;

  int first_rank_, ranks_;
  std::optional<SharedMemory> memory_;
};

/// Reads the recordings that ranks left in `file`, "FILE.rank1", ... Throws BadInput for files that
/// are no recordings, or not of one job.
std::vector<FlightRank> read_flight_files(const std::string& file);

}  // namespace lockstep
