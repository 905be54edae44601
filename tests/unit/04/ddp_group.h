#pragma once
// Ranks of DistributedDataParallel in one process.

#include <future>

#include "04-ddp/manual_ddp.h"
#include "common/core/error.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/ddp_test_support.h"
#include "tests/support/local_store.h"

namespace lockstep::testing::ddp {

/// The ranks of a group, whose members begin with different weights. One host thread enqueues the
/// passes of all ranks: nothing that is enqueued waits for the host.
class Group {
 public:
  explicit Group(int world_size, const MakeModule& make = small_network(),
                 const ReplicaOptions& options = {}, bool manual = false)
      : manual_(manual), ranks_(testing::gloo_ranks(world_size)) {
    std::vector<std::future<void>> wrapped;
    for (int rank = 0; rank < world_size; ++rank) {
      members.push_back(std::make_unique<Member>(rank, make, uint64_t(rank) + 1));
    }
    for (int rank = 0; rank < world_size; ++rank) {
      wrapped.push_back(std::async(std::launch::async, [&, rank] { wrap(rank, options); }));
    }
    for (std::future<void>& rank : wrapped) rank.wait();
    for (std::future<void>& rank : wrapped) {
      errors.push_back(message_of<BadInput>([&] { rank.get(); }));
    }
  }

  int size() const { return ranks_.size(); }
  Member& operator[](int rank) { return *members[size_t(rank)]; }

  /// Makes the gradients of the mean over `samples`, dealt to the ranks; rank r's: operator[](r).
  void gradients(const Samples& samples) {
    for (int rank = 0; rank < size(); ++rank) {
      Member& member = (*this)[rank];
      member.parameters.zero_gradients();
      member.accumulate(samples.every(rank, size()), double(size()) / double(samples.count()));
    }
  }
  void step(const Samples& samples) {
    gradients(samples);
    for (const auto& member : members) {
      member->optimizer.step(member->context.state(), member->loss);
      ++member->steps;
    }
  }

  Communicator& communicator(int rank) { return *ranks_.comms[size_t(rank)]; }
  /// Closes a rank's connections.
  void leave(int rank) { ranks_.comms[size_t(rank)].reset(); }

  std::vector<std::unique_ptr<Member>> members;
  std::vector<std::string> errors;  // of the construction, by rank; "" where there was none

 private:
  void wrap(int rank, const ReplicaOptions& options) {
    Member& member = (*this)[rank];
    if (manual_) {
      member.network = std::make_unique<ManualDdp>(
          std::move(member.network), member.parameters, *ranks_.comms[size_t(rank)],
          member.communication, options.all_reduce, options.compress);
      return;
    }
    const auto exchange = [&](const std::string& mine) {
      return store_.exchange(rank, size(), mine);
    };
    member.network = std::make_unique<DistributedDataParallel>(
        std::move(member.network), member.parameters, *ranks_.comms[size_t(rank)], exchange,
        member.communication, options);
  }

  bool manual_;
  testing::LocalStore store_;
  testing::Ranks ranks_;
};

/// The result of one device for the same samples, beginning with rank 0's weights.
inline std::vector<Real> single_device_gradients(const Samples& samples,
                                                 const MakeModule& make = small_network()) {
  Member whole(0, make, 1);
  whole.accumulate(samples, 1.0 / double(samples.count()));
  return whole.gradients();
}

}  // namespace lockstep::testing::ddp
