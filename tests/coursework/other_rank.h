#pragma once
// Two ranks, one of them played by the test.

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "common/comm/communicator.h"
#include "common/core/error.h"
#include "tests/support/tasks.h"

namespace lockstep::testing {

/// Rank 0 of two, unless said otherwise. What the other rank adds to every sum is known, so a test
/// sees each call of a rank and no rank waits for another.
class OtherRank final : public Communicator {
 public:
  explicit OtherRank(Real its_share, int world_size = 2, int rank = 0)
      : Communicator(rank, world_size), its_share_(its_share) {}

  struct Sum {
    Elements x;
    Stream stream;
    Purpose purpose;
  };
  std::vector<Sum> sums;                     // enqueued, in order
  std::vector<Sum> gathers;                  // likewise: all ranks' numbers; its own are its share
  std::atomic<int> done = 0;                 // of them, by the device
  std::function<void()> before_sum = [] {};  // what the device does first, for a gather, too

  /// How many of them the device has made, if it gets a moment to make more than `expected`.
  int done_after_a_while(int expected) const {
    const auto begin = Clock::now();
    while (done <= expected && seconds_since(begin) < 0.1) std::this_thread::yield();
    return done;
  }

 private:
  void enqueue(Stream stream, const std::vector<Call>& together, FlightCall) override {
    const Call& call = together[0];
    if (call.op == Call::Op::broadcast) return;  // rank 0 has what it sends
    if (call.op == Call::Op::all_gather) return gather(stream, call);
    require(call.op == Call::Op::all_reduce,
            "a call of {}, expected all_reduce and all_gather only", name_of(call.op));
    sums.push_back({call.mine, stream, call.purpose});
    const Real part = call.reduction == Reduction::average ? Real(1) / Real(world_size()) : 1;
    testing::enqueue(stream, "all_reduce", [this, x = call.mine, part] {
      before_sum();
      Real* const values = static_cast<Real*>(x.data);
      for (int64_t i = 0; i < x.count; ++i) values[i] = (values[i] + its_share_) * part;
      ++done;
    });
  }
  void gather(Stream stream, const Call& call) {
    gathers.push_back({call.all, stream, call.purpose});
    testing::enqueue(stream, "all_gather", [this, mine = call.mine, all = call.all] {
      before_sum();
      Real* const values = static_cast<Real*>(all.data);
      std::copy_n(static_cast<const Real*>(mine.data), mine.count, values);
      std::fill(values + mine.count, values + all.count, its_share_);
      ++done;
    });
  }
  const Real its_share_;
};

}  // namespace lockstep::testing
