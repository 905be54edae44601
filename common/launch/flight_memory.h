#pragma once
// Where the ranks of one start leave their last calls, so that the launcher can tell where each
// was.

#include <optional>
#include <string>
#include <vector>

#include "common/launch/rank_end.h"
#include "common/system/shared_memory.h"

namespace lockstep {

/// Memory without a name: it is gone with the last of launcher and ranks.
class FlightMemory {
 public:
  /// Of `ranks` ranks of this node, the first of which has the number `first_rank`. If the system
  /// gives no memory, nothing is recorded.
  FlightMemory(int first_rank, int ranks);

  /// For the ranks to inherit; -1 if there is no memory.
  int descriptor() const { return memory_ ? memory_->descriptor().get() : -1; }
  /// The table (flight_table.h) of this moment, for ranks of which these have ended, or are
  /// stopped, `cause` first of all.
  std::vector<std::string> table(const std::vector<RankEnd>& ends, const RankEnd& cause) const;

 private:
  int first_rank_, ranks_;
  std::optional<SharedMemory> memory_;
};

}  // namespace lockstep
