#pragma once
// Collectives between devices that one process can reach: CPU devices, or replicas on one GPU.

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "common/comm/single_process_world.h"

namespace lockstep {

/// Every collective is three steps on the ranks' streams: all wait for all (so that nobody's memory
/// is touched early), each rank does its share by plain copies and sums, all wait for all again (so
/// that nobody continues early). Events do the waiting; no thread ever blocks, so nothing can hang
/// here that did not hang before. Sums are made in rank order: the same bits on all ranks and in
/// every run.
class CopyWorld final : public SingleProcessWorld {
 public:
  explicit CopyWorld(std::vector<Device*> devices);

  std::string description() const override { return "in-process"; }
  void wait(double timeout_seconds) override;

 private:
  void enqueue(const GroupCalls& calls) override;
  void hold_meeting(const std::vector<IssuedCall>& members, const std::function<void()>& share);
  [[noreturn]] void give_up(const std::string& why);
  void settle_first();

  /// One collective or transfer that wait() has not yet seen finished.
  struct Meeting {
    int64_t group;
    Call call;  // the one of its first rank
    std::vector<int> ranks{};
    std::vector<Event> arrived{}, finished{};  // of those ranks
  };
  std::deque<Meeting> meetings_;
};

}  // namespace lockstep
