#pragma once
// Collectives in the middle of a pass, which needs their results to go on.

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "common/comm/communicator.h"
#include "common/nn/context.h"
#include "common/training/phase_timer.h"

namespace lockstep {

/// Runs such collectives on a stream of their own. All other collectives of the same rank go to
/// that stream, too, so that all calls reach the communicator in one order.
class PassCollectives {
 public:
  /// `comm` must outlive the passes.
  PassCollectives(Communicator& comm, Stream communication)
      : comm_(comm), communication_(communication), calls_(communication) {}

  /// Calls make_calls(stream) with the stream of the calls: after what the pass has enqueued so
  /// far, and before what it enqueues next. The host does not wait. Errors name `layer`; in
  /// training the bytes are counted under `purpose`, and the times are taken.
  template <class MakeCalls>
  void run(const std::string& layer, Purpose purpose, Context& context, MakeCalls make_calls) {
    const bool training = context.facts.training;
    const Stream pass = context.stream();
    const CallLabel label(comm_, layer);
    const CallPurpose counted(comm_, training ? purpose : Purpose::other);
    if (!waits_) waits_.emplace(pass);
    const auto work = [&](Stream stream) {
      if (training) calls_.start();
      make_calls(stream);
      calls_.end("called");
      calls_.stop();
    };
    if (training) waits_->start();
    communication_.wait(pass.record());  // its numbers are there
    work(communication_);
    pass.wait(communication_.record());  // so are the results
    waits_->end("waited");
    waits_->stop();
  }

  Communicator& comm() const { return comm_; }
  /// Seconds that training passes have waited so far. Waits for the last call.
  double seconds_waited() { return waits_ ? waits_->total("waited") : 0; }
  /// The part of these seconds in which the calls had not begun. Earlier calls were on the stream,
  /// or the calls were handed from one thread to another.
  double seconds_queued() { return std::max(0.0, seconds_waited() - calls_.total("called")); }

 private:
  Communicator& comm_;
  Stream communication_;
  PhaseTimer calls_;                 // on their stream: when it came to each, and its end
  std::optional<PhaseTimer> waits_;  // on the stream of the passes
};

}  // namespace lockstep
