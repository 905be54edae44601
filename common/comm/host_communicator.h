#pragma once
// Collectives between processes, through host memory.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/comm/communicator.h"
#include "common/comm/host_staging.h"
#include "common/core/stream_backend.h"

namespace lockstep {

/// What carries numbers between the processes of a group: shared memory, TCP, or Gloo.
class HostTransport {
 public:
  virtual ~HostTransport() = default;

  /// "shm", "tcp" or "gloo".
  virtual std::string description() const = 0;
  /// This rank's part of a collective whose memory is the host's. `number` counts the collectives
  /// from 1 and is the same on all ranks. Blocks. Throws PeerLost, saying why, when another rank
  /// died or did not come in time.
  virtual void run(const Call& collective, uint64_t number) = 0;
  /// Sends and receives all at the same time: no transfer waits for another.
  virtual void transfer(const std::vector<Call>& calls) = 0;
  /// Bytes that these two have given to other ranks so far. On the thread that calls them.
  virtual int64_t bytes_sent() const = 0;
  /// Where they are counted: where they leave, unless that is said.
  virtual std::string counted_in() const { return description(); }
};

/// One process's membership of a group. A call is a task of its stream, which runs it on a thread
/// of the host; a GPU's numbers go there and back through page-locked memory, so the communicator
/// must be destroyed before the device. Calls on several streams run in the order in which they
/// were issued: their messages share connections. A send ends when its peer receives.
class HostCommunicator final : public Communicator {
 public:
  HostCommunicator(int rank, int world_size, std::shared_ptr<HostTransport> transport)
      : Communicator(rank, world_size, std::make_shared<SentBytes>(transport->counted_in())),
        held_(Held{std::move(transport), sent()}),
        staging_(rank) {}

  const HostTransport& transport() const { return *held_->transport; }

 private:
  struct Held {
    std::shared_ptr<HostTransport> transport;
    std::shared_ptr<SentBytes> sent;
    /// What the host does between the copies: makes these calls, and counts what they send. `who`
    /// made them, for errors.
    void make(const std::vector<Call>& together, FlightCall& flight, const std::string& who) const;
  };

  void enqueue(Stream stream, const std::vector<Call>& together, FlightCall flight) override;
  std::function<void()> task(const std::vector<Call>& together, FlightCall flight) const;

  Kept<Held> held_;  // by queued tasks, too
  HostStaging staging_;
  std::optional<Event> last_;  // after the last call
};

}  // namespace lockstep
