#pragma once
// Collectives between processes, through host memory.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/comm/communicator.h"
#include "common/comm/host_transport.h"
#include "common/comm/roll_call.h"
#include "common/core/stream_backend.h"

namespace lockstep {

/// A GPU's numbers on the host: page-locked memory for one rank's calls. The calls run one after
/// another and use the same memory. Only the numbers that a call reads are copied down, and only
/// those that it writes are copied up. Must be destroyed before the device.
class HostStaging {
 public:
  explicit HostStaging(int rank) : rank_(rank) {}

  /// Enqueues the copies down on `stream`, and returns the calls with host memory in place of the
  /// device's. `stream` must have waited for the last copy_up(): the host memory is the same.
  /// Throws EnvironmentError if there is no room for the memory.
  std::vector<Call> copy_down(Stream stream, const std::vector<Call>& calls);
  /// Enqueues the copies up; `on_host` is what copy_down() returned for the calls.
  void copy_up(Stream stream, const std::vector<Call>& calls,
               const std::vector<Call>& on_host) const;

 private:
  char* reserve(Device& device, int64_t bytes);

  int rank_;
  int64_t bytes_ = 0;                          // size of the last piece, which is in use
  std::vector<std::shared_ptr<void>> memory_;  // pieces; queued calls may still use earlier ones
};

/// One process's membership of a group. A call is a task of its stream: a thread of the host runs
/// the task. A GPU's numbers go there and back through page-locked memory, so the communicator must
/// be destroyed before the device. Calls on several streams run in the order in which they were
/// issued, because their messages share connections. A send ends when its peer receives. After a
/// transport has failed, all later calls throw the same error.
class HostCommunicator final : public Communicator {
 public:
  /// With a roll call, errors name the ranks concerned; without one, they are the transport's
  /// errors. `kept` is the flight recorder to which tasks write; it lives as long as tasks are
  /// queued. An error breaks off all transports in `of_rank`.
  HostCommunicator(int rank, int world_size, std::shared_ptr<HostTransport> transport,
                   std::optional<RollCall> roll_call = {}, std::shared_ptr<const void> kept = {},
                   std::shared_ptr<const RankTransports> of_rank = {})
      : Communicator(rank, world_size, std::make_shared<SentBytes>(transport->counted_in())),
        largest_whole_sum_(transport->largest_whole_sum()),
        link_(Link{std::move(transport), std::move(roll_call), sent(), std::move(kept),
                   std::move(of_rank), ""}),
        staging_(rank) {}

  const HostTransport& transport() const { return *link_->transport; }
  /// Makes the transport's errors name ranks as this communicator does. Must come before any call.
  void name_peers() {
    link_->transport->name_peers([this](int rank) { return name_of_rank(rank); });
  }
  int64_t bytes_of_all_reduce(const Elements& x) const override;

 private:
  /// The state that all calls share.
  struct Link {
    std::shared_ptr<HostTransport> transport;  // with a roll call: none after an error
    std::optional<RollCall> roll_call;
    std::shared_ptr<SentBytes> sent;
    std::shared_ptr<const void> kept;
    std::shared_ptr<const RankTransports> of_rank;  // null: there is no other
    std::string broken;                             // that error
  };
  struct Task;

  void enqueue(Stream stream, const std::vector<Call>& together, FlightCall flight) override;

  int64_t largest_whole_sum_;  // of the transport
  Kept<Link> link_;            // by queued tasks, too
  HostStaging staging_;
  std::optional<Event> last_;  // after the last call
};

}  // namespace lockstep
