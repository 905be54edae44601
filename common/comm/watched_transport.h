#pragma once
// Which rank is missing? Libraries only say that time is up, or which connection broke.

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/comm/host_communicator.h"
#include "common/rendezvous/store.h"

namespace lockstep {

/// A transport whose errors name the ranks concerned. It costs a collective nothing: only when a
/// collective has failed do the ranks meet in the store, where each leaves what it was doing.
///
///   a rank died                      "rank 2 closed the connection", whichever connection broke
///   a rank gave up                   "rank 1 gave up: ..." with its last words
///   a rank is silent                 "no answer from rank 2 within 5 s": it has not come to any
///                                    collective, be it stopped or busy with something else
///   all came, to different ones      what another rank called
///
/// All later calls throw the same error.
///
/// With `compare_calls` (LOCKSTEP_DEBUG=collectives; the same on all ranks) every collective begins
/// with an exchange of what the ranks called: number, operation, count, element type, reduction,
/// root, label. If they differ, all ranks throw PeerLost with two calls that differ, before a
/// library hangs, ends the process or mixes up memory. Sends and receives are not compared: a pair
/// that does not fit together is found by a timeout at best.
class WatchedTransport final : public HostTransport {
 public:
  /// `timeout_seconds` is that of `transport`: for the texts. `kept` lives as long as this, which
  /// queued tasks hold: the flight recorder that they write to.
  WatchedTransport(std::shared_ptr<HostTransport> transport, std::shared_ptr<Store> store,
                   double timeout_seconds, bool compare_calls,
                   std::shared_ptr<const void> kept = {});

  std::string description() const override { return description_; }
  void run(const Call& collective, uint64_t number) override;
  void transfer(const std::vector<Call>& calls) override;
  /// The comparisons of calls are among them.
  int64_t bytes_sent() const override { return transport_ ? transport_->bytes_sent() : 0; }
  std::string counted_in() const override { return counted_in_; }

 private:
  /// What this rank is doing, and which ranks that concerns: all, if none is named.
  struct Doing {
    std::string text;
    std::set<int> peers{};
  };
  template <class Work, class Describe>
  void watched(Work work, Describe describe);
  void compare(const Call& collective, uint64_t number);
  std::string explain(const Doing& doing, const std::string& reason);
  std::string call_roll(const Doing& doing, const std::string& reason, std::vector<int>& absent);

  std::string description_, counted_in_;
  std::shared_ptr<HostTransport> transport_;  // none after an error
  std::shared_ptr<Store> store_;
  double timeout_;
  bool compare_calls_;
  std::shared_ptr<const void> kept_;
  std::string broken_;  // why no further call can work
};

}  // namespace lockstep
