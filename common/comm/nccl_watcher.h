#pragma once
// Finds who keeps a rank of NCCL's waiting for too long, on a thread beside the one that calls.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "common/core/stream.h"
#include "common/system/flight_recorder.h"

namespace lockstep {

/// A call given to NCCL, or transfers that run at the same time, all on one stream.
struct NcclCall {
  std::string what;  // "rank 0: collective 3 (all_reduce of 5 f32, sum)"
  std::string whom;  // the ranks for which the call waits: "rank 1"
  Stream stream;
  FlightCall flight{};
  std::optional<Event> arrived{}, finished{};  // NCCL waits for the peers between these two
  std::optional<TimedEvent> begin{}, end{};    // the same with times, where the call is recorded
  std::optional<std::chrono::steady_clock::time_point> came{};  // seen to begin, as the oldest

  /// Enqueue the events.
  void record_begin();
  void record_end();

  bool has_begun() const { return arrived->done(); }
  bool has_finished() const;
  /// Tells the flight recorder how far the call has come. Returns whether it has finished. Asks
  /// once only: a call that ended between two questions would be forgotten before it is recorded.
  bool note();
};

/// Watches one rank's calls to NCCL. The rank waits for the others inside a call, which first
/// connects them, and then on the GPU. The rank waits for ever if a rank does not come. The host
/// cannot look meanwhile. So a thread looks fifty times a second how long the running call has
/// lasted. If no call runs, the thread looks how long the oldest call on the GPU has waited, and
/// whether NCCL has found an error. If a rank is lost, the thread throws PeerLost, which nobody
/// catches: the program reports the error and ends at once (options/report.h), by _Exit(2).
///
/// The watcher does not see a host that is stuck elsewhere in the driver, with a lock that the
/// watcher's questions need.
class NcclWatcher {
 public:
  /// `gpu` is the GPU's number. `check_nccl` throws PeerLost if NCCL found an error in the
  /// background; the watcher calls `check_nccl` while no call runs.
  NcclWatcher(int gpu, double timeout_seconds, std::function<void()> check_nccl);
  /// Ends the watching, and records the calls that have ended.
  ~NcclWatcher();
  NcclWatcher(const NcclWatcher&) = delete;
  NcclWatcher& operator=(const NcclWatcher&) = delete;

  /// While this object lives, the host is in a call of NCCL's. If the call lasts too long, `late`
  /// gives the error's text, on the watcher's thread.
  class Inside {
   public:
    Inside(NcclWatcher& watcher, std::function<std::string()> late);
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    NcclWatcher& watcher_;
  };

  /// Adds a call that NCCL has taken.
  void add(NcclCall call);
  /// Gives up all calls that have not ended: they will not end.
  void give_up();

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  void look();
  void forget_finished();
  void ask_nccl();
  void find_silence();
  [[noreturn]] void end_process(const std::string& why);
  bool note_last_calls();
  bool is_too_long(Clock::time_point since) const;

  const int gpu_;
  const double timeout_seconds_;
  const std::function<void()> check_nccl_;
  std::mutex mutex_;  // between the host and the watcher, over all of these:
  std::condition_variable stopped_;
  bool stop_ = false;
  std::function<std::string()> late_{};  // of the call in which the host is; null: in none
  Clock::time_point entered_{};
  std::deque<NcclCall> calls_;  // what NCCL has, in order
  std::thread thread_;          // the last member: it uses all of the above
};

}  // namespace lockstep
