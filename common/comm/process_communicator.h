#pragma once
// A rank that has its process to itself.

#include <memory>
#include <utility>
#include <vector>

#include "common/comm/call_check.h"
#include "common/system/flight_recorder.h"

namespace lockstep {

/// Where the calls of a group are recorded.
struct FlightGroup {
  std::shared_ptr<FlightRecorder> recorder{};
  uint64_t number = 0;         // FlightEntry::group
  std::vector<int> members{};  // their ranks in the job, by rank here; empty: all
};

/// Its calls are enqueued when they are made or, in a group, when the group is closed: one after
/// another, in their order.
class ProcessCommunicator : public Communicator {
 public:
  void open_group() override;
  void close_group() override;
  /// Call it before the first call.
  void record_in(FlightGroup flight) { flight_ = std::move(flight); }

 protected:
  ProcessCommunicator(int rank, int world_size, std::shared_ptr<SentBytes> sent)
      : Communicator(rank, world_size, std::move(sent)) {}
  /// One collective, or transfers that run at the same time. `flight` has its number, from 1, and
  /// is to be told when it begins and ends.
  virtual void enqueue(Stream stream, const std::vector<Call>& together, FlightCall flight) = 0;

 private:
  void issue(Stream stream, const Call& call) override;
  FlightCall flight_of(const std::vector<Call>& together);
  uint64_t members_of(const std::vector<Call>& together) const;

  FlightGroup flight_;
  uint64_t collectives_ = 0, transfers_ = 0;  // the number so far
  bool open_ = false;
  std::vector<IssuedCall> issued_;  // in the open group
};

}  // namespace lockstep
