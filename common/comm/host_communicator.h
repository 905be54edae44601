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

/// A GPU's numbers on the host: page-locked memory for one rank's calls, which run one after
/// another and take turns in it. Only what is needed is copied: down what a call reads, up what it
/// writes. Must be destroyed before the device.
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

/// One process's membership of a group. A call is a task of its stream, which runs it on a thread
/// of the host; a GPU's numbers go there and back through page-locked memory, so the communicator
/// must be destroyed before the device. Calls on several streams run in the order in which they
/// were issued: their messages share connections. A send ends when its peer receives. When a
/// transport has failed, all later calls throw the same error.
class HostCommunicator final : public Communicator {
 public:
  /// With a roll call, errors name the ranks concerned; without it, they are the transport's
  /// errors. `kept` is kept alive as long as tasks are queued: the flight recorder to which they
  /// write. An error breaks off all transports of the rank.
  HostCommunicator(int rank, int world_size, std::shared_ptr<HostTransport> transport,
                   std::optional<RollCall> roll_call = {}, std::shared_ptr<const void> kept = {},
                   std::shared_ptr<const RankTransports> of_rank = {})
      : Communicator(rank, world_size, std::make_shared<SentBytes>(transport->counted_in())),
        largest_whole_sum_(transport->largest_whole_sum()),
        link_(Link{std::move(transport), std::move(roll_call), sent(), std::move(kept),
                   std::move(of_rank), ""}),
        staging_(rank) {}

  const HostTransport& transport() const { return *link_->transport; }
  /// The transport's errors name ranks as this communicator does. Call it before the first call.
  void name_peers() {
    link_->transport->name_peers([this](int rank) { return name_of_rank(rank); });
  }
  int64_t bytes_of_all_reduce(const Elements& x) const override;

 private:
  /// What all calls share.
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
