#pragma once
// Who keeps a rank of NCCL's waiting for too long: a thread beside the one that makes the calls.

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
  std::string whom;  // it waits for: "rank 1"
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
  /// Tells the flight recorder what the device has come to. Whether the call has finished: asked
  /// once, for what ends between two questions would be forgotten before it is recorded.
  bool note();
};

/// A rank waits for the others within a call of NCCL's, which first connects them, and then on the
/// GPU: for ever if one of them does not come. The host cannot look meanwhile. So a thread looks,
/// fifty times a second, how long the running call has lasted; where none runs, how long the oldest
/// one on the GPU has waited, and whether NCCL has found an error. If a rank is lost, the thread
/// throws PeerLost, which nobody catches: the program reports it and ends at once
/// (options/report.h), by _Exit(2).
///
/// It does not see a host that is stuck elsewhere in the driver, with a lock that its questions
/// need.
class NcclWatcher {
 public:
  /// `gpu`: which one. `check_nccl` throws PeerLost if NCCL found an error in the background; it is
  /// called while no call runs.
  NcclWatcher(int gpu, double timeout_seconds, std::function<void()> check_nccl);
  /// From then on nobody watches. What has ended is recorded.
  ~NcclWatcher();
  NcclWatcher(const NcclWatcher&) = delete;
  NcclWatcher& operator=(const NcclWatcher&) = delete;

  /// While it lives, the host is in a call of NCCL's. `late` gives the error's text, should the
  /// call last too long; it runs on the watcher's thread.
  class Inside {
   public:
    Inside(NcclWatcher& watcher, std::function<std::string()> late);
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    NcclWatcher& watcher_;
  };

  /// NCCL has the call.
  void add(NcclCall call);
  /// The calls that have not ended will not.
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
