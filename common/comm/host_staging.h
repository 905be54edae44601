#pragma once
// A GPU's numbers on the host, for a transport that knows host memory only.

#include <memory>
#include <vector>

#include "common/comm/communicator.h"

namespace lockstep {

/// Page-locked host memory for one rank's calls, which run one after another and take turns in it.
/// Only what is needed is copied: down what a call reads, up what it writes. Must be destroyed
/// before the device.
class HostStaging {
 public:
  explicit HostStaging(int rank) : rank_(rank) {}

  /// The calls of rank `rank` with host memory in place of the device's. Enqueues the copies down
  /// on `stream`, which must have waited for the last copy_up(): the memory is the same. Throws
  /// EnvironmentError if there is no room for it.
  std::vector<Call> copy_down(Stream stream, const std::vector<Call>& calls);
  /// Enqueues the copies up; `on_host` is what copy_down() returned for the calls.
  void copy_up(Stream stream, const std::vector<Call>& calls,
               const std::vector<Call>& on_host) const;

 private:
  char* reserve(Device& device, int64_t bytes);

  int rank_;
  int64_t bytes_ = 0;                          // of the last one, which is in use
  std::vector<std::shared_ptr<void>> memory_;  // earlier ones; queued calls may still use them
};

}  // namespace lockstep
