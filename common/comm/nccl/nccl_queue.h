#pragma once
// The calls that the ranks of one process have given to NCCL and that have not ended yet, and how
// all end when a rank fails.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/comm/call_check.h"
#include "common/comm/nccl/nccl_ranks.h"
#include "common/core/buffer.h"
#include "common/system/flight_recorder.h"

namespace lockstep {

namespace cuda {
class DeviceState;
}

/// Where ranks count what they send (SentBytes): NCCL does not tell.
constexpr const char* kCountedInNcclCalls = "its calls to NCCL";

/// A collective waits on the GPU for its peers, for ever if a peer does not come. If a peer has
/// failed, launch(), wait() and any waiting of the host for a stream of the devices end that. If a
/// peer does not come, wait() ends it, and so does such waiting, after `patience_seconds`.
class NcclQueue {
 public:
  using CallList = std::vector<IssuedCall>;  // what goes into one NCCL group, in the order for NCCL
  using Clock = std::chrono::steady_clock;

  /// Throws as NcclRanks does. `on_failure` is called once, with the reason why nothing can follow:
  /// no launch() after that.
  NcclQueue(NcclMembers members, double deadline_seconds, double patience_seconds,
            std::function<void(const std::string& why)> on_failure);
  ~NcclQueue();
  NcclQueue(const NcclQueue&) = delete;
  NcclQueue& operator=(const NcclQueue&) = delete;

  /// Adds nothing for a call of no elements. A barrier gets one element to reduce.
  void append(CallList& batch, IssuedCall issued);
  /// "all_reduce of 5 f32, sum", and ", ..." if the calls differ.
  static std::string text_of(const CallList& batch);
  /// Enqueues a batch; `what` names it in errors. Throws PeerLost if a rank has failed: everything
  /// is given up then, and all streams of the devices report why.
  /// `flight` learns when it begins and ends, as soon as the host asks (by events of the stream).
  void launch(const CallList& batch, const std::string& what, FlightCall flight = {});
  /// Blocks the host until what was launched has ended; throws PeerLost, naming the ranks that did
  /// not come in time, and gives everything up.
  void wait(double timeout_seconds);

 private:
  /// One stream's part in a batch that may still run.
  struct Part {
    int rank;
    Stream stream;
    Event arrived, finished;
  };
  struct Pending {
    std::string what;  // "group 3 of collectives (all_reduce of 5 f32, sum)"
    std::vector<Part> parts;
    FlightCall flight{};  // and, where it is recorded, its begin and end on the stream
    std::optional<TimedEvent> begin{}, end{};
    std::optional<Clock::time_point> came{};  // when the host saw it begin, as first in the queue
    bool arrived() const;
    bool finished() const;
    void note();
  };

  void try_to_launch(const CallList& batch, const std::string& what, FlightCall flight);
  std::vector<Stream> arrive(const CallList& batch, const std::string& what, FlightCall flight);
  void watch(cuda::DeviceState& device);
  void look();
  void forget_finished();
  std::string failure() const;
  std::string failure_of(const Pending& pending) const;
  std::string silence();
  std::string lateness(double timeout_seconds) const;
  void give_up(const std::string& why);
  Elements barrier_element(Stream stream);

  std::thread::id host_ = std::this_thread::get_id();  // the one thread that calls
  double patience_seconds_;
  std::function<void(const std::string&)> on_failure_;
  std::vector<Pending> pending_;  // in order
  std::vector<cuda::DeviceState*> watched_;
  std::vector<std::unique_ptr<Buffer>> barrier_memory_;  // an element per stream that had a barrier
  NcclRanks nccl_;                                       // destroyed first
};

}  // namespace lockstep
