#pragma once
// A rank that has its process to itself.

#include <vector>

#include "common/comm/call_check.h"

namespace lockstep {

/// Its calls are enqueued when they are made or, in a group, when the group is closed: one after
/// another, in their order.
class ProcessCommunicator : public Communicator {
 public:
  void open_group() override;
  void close_group() override;

 protected:
  ProcessCommunicator(int rank, int world_size) : Communicator(rank, world_size) {}
  /// One collective, or transfers that run at the same time.
  virtual void enqueue(Stream stream, const std::vector<Call>& together) = 0;

 private:
  void issue(Stream stream, const Call& call) override;

  bool open_ = false;
  std::vector<IssuedCall> issued_;  // in the open group
};

}  // namespace lockstep
