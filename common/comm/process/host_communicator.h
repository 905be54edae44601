#pragma once
// Collectives between processes, through host memory.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/comm/communicator.h"

namespace lockstep {

/// What carries numbers between the processes of a group: Gloo, or the hand-written ring.
class HostTransport {
 public:
  virtual ~HostTransport() = default;

  /// "gloo" or "ring".
  virtual std::string description() const = 0;
  /// This rank's part of a collective whose memory is the host's. `number` counts the collectives
  /// from 1 and is the same on all ranks. Blocks. Throws PeerLost, saying why, when another rank
  /// died or did not come in time.
  virtual void run(const Call& collective, uint64_t number) = 0;
  /// Sends and receives all at the same time: none of them waits for another.
  virtual void transfer(const std::vector<Call>& calls) = 0;
};

/// One process's membership of a group. A call is a task of its stream, which runs it on the
/// device's thread. Calls on several streams run in the order in which they were issued: their
/// messages share connections. A send ends when its peer receives.
class HostCommunicator final : public Communicator {
 public:
  HostCommunicator(int rank, int world_size, std::shared_ptr<HostTransport> transport)
      : Communicator(rank, world_size), transport_(std::move(transport)) {}

  const HostTransport& transport() const { return *transport_; }

  void open_group() override;
  void close_group() override;

 private:
  struct Issued {
    Stream stream;
    Call call;
  };

  void issue(Stream stream, const Call& call) override;
  void enqueue_collective(const Issued& issued);
  void enqueue_transfers(Stream stream, std::vector<Call> calls);
  void enqueue(Stream stream, const char* op, std::function<void()> body);

  std::shared_ptr<HostTransport> transport_;  // of queued tasks, too
  bool open_ = false;
  std::vector<Issued> issued_;  // in the open group
  uint64_t collectives_ = 0;    // so far
  std::optional<Event> last_;   // behind the last call
};

}  // namespace lockstep
