#pragma once
// Which rank is missing? Libraries only say that time is up, or which connection broke.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/comm/host_transport.h"
#include "common/rendezvous/store.h"

namespace lockstep {

/// Finds out why a call of a group has failed. Costs nothing while calls succeed: the ranks meet in
/// the store only after a failure, and each rank leaves there what it was doing.
///
///   a rank died                      "rank 2 closed the connection", whichever connection broke
///   a rank gave up                   "rank 1 gave up: ..." with its last words
///   a rank is silent                 "no answer from rank 2 within 5 s": it has not come to any
///                                    collective, and is stopped or busy with something else
///   all came, to different ones      what another rank called
///
/// If it `compares_calls` (LOCKSTEP_DEBUG=collectives; the same on all ranks) every collective
/// begins with an exchange. The ranks say what they called: number, operation, count, element type,
/// reduction, root, label. So all ranks learn of two calls that differ before a library hangs, ends
/// the process or mixes up memory. Sends and receives are not compared: at best a timeout finds a
/// pair that does not fit together.
class RollCall {
 public:
  /// `timeout_seconds` is the transport's timeout, for the texts of errors.
  RollCall(std::shared_ptr<Store> store, double timeout_seconds, bool compares_calls)
      : store_(std::move(store)), timeout_(timeout_seconds), compares_calls_(compares_calls) {}

  bool compares_calls() const { return compares_calls_; }
  /// Call::text(), with the store's name for the other side of a transfer.
  std::string text_of(const Call& call) const;
  /// Says which two ranks' calls differ, and how; empty if none differ. The exchange is collective
  /// `number` of the transport.
  std::string difference(HostTransport& transport, const Call& collective, uint64_t number) const;
  /// Says what all ranks together know about the failure of `calls`, one collective or some
  /// transfers. `reason` is the transport's. Close the transport before: peers that wait for this
  /// rank must come to the roll call, too.
  std::string explain(const std::vector<Call>& calls, uint64_t number,
                      const std::string& reason) const;

 private:
  std::string call_roll(const std::vector<Call>& calls, const std::string& doing,
                        const std::string& reason, std::vector<int>& absent) const;

  std::shared_ptr<Store> store_;
  double timeout_;
  bool compares_calls_;
};

}  // namespace lockstep
