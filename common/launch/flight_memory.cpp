#include "common/launch/flight_memory.h"

#include "common/core/error.h"
#include "common/launch/flight_table.h"
#include "common/system/flight_recorder.h"

namespace lockstep {

FlightMemory::FlightMemory(int first_rank, int ranks) : first_rank_(first_rank), ranks_(ranks) {
  try {
    memory_.emplace(SharedMemory::create(size_t(ranks) * flight_stride()));
  } catch (const EnvironmentError&) {  // then no rank can leave anything
  }
}

std::vector<std::string> FlightMemory::table(const std::vector<RankEnd>& ends,
                                             const RankEnd& cause) const {
  std::vector<FlightRank> ranks;
  for (int local = 0; memory_ && local < ranks_; ++local) {
    const auto words = copy_flight_page(memory_->data() + size_t(local) * flight_stride());
    if (is_empty_flight_page(words)) continue;  // a program without a process group, or not yet
    FlightRank rank;
    try {
      rank.log = read_flight_page(words);
    } catch (const BadInput&) {
      continue;
    }
    if (rank.log.header.rank != uint64_t(first_rank_ + local)) continue;
    for (const RankEnd& end : ends) {
      if (end.rank == first_rank_ + local) rank.end = end.how();
    }
    if (cause.rank == first_rank_ + local) {
      rank.end = cause.how();
      rank.failed = !cause.may_be_answer();
    }
    ranks.push_back(std::move(rank));
  }
  return flight_table(std::move(ranks), steady_ns());
}

}  // namespace lockstep
