#pragma once
// Collectives between different GPUs of one process, by NCCL.

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/comm/local_world.h"
#include "common/comm/nccl/nccl_ranks.h"
#include "common/core/buffer.h"

namespace lockstep {

/// The calls of a group are written down while it is open, compared when it closes, and only then
/// given to NCCL, which would answer a disagreement with a hang or with wrong numbers. A collective
/// waits on the GPUs for its peers. Where one has failed, wait() ends that, and so does any other
/// waiting of the host for one of the streams; wait() alone also has an end for a peer that does
/// not come.
class NcclWorld final : public LocalWorld {
 public:
  /// Throws BadInput if two ranks are on one GPU, which NCCL does not serve; PeerLost if the ranks
  /// do not reach each other before the deadline.
  NcclWorld(std::vector<Device*> devices, double deadline_seconds);
  ~NcclWorld() override;

  std::string description() const override;
  void wait(double timeout_seconds) override;

 private:
  using Batch = std::vector<IssuedCall>;  // what goes into one NCCL group, as NCCL is to get it
  /// One stream's part in a batch that may still run.
  struct Part {
    int rank;
    Stream stream;
    Event arrived, finished;
  };
  struct Pending {
    std::string what;  // "group 3 of collectives (all_reduce of 5 f32, sum)"
    std::vector<Part> parts;
    bool finished() const;
  };

  void enqueue(const GroupCalls& calls) override;
  std::vector<Batch> batches(const GroupCalls& calls);
  void append(Batch& batch, IssuedCall issued);
  void launch(const Batch& batch);
  std::vector<Stream> arrive(const Batch& batch, const std::string& what);
  void watch(Stream stream);
  void forget_finished();
  std::string failure() const;
  std::string lateness(double timeout_seconds) const;
  [[noreturn]] void give_up(const std::string& why);
  Elements barrier_element(Stream stream);

  std::thread::id host_ = std::this_thread::get_id();  // the one thread that calls
  std::vector<Pending> pending_;                       // in order
  std::vector<Stream> watched_;
  std::vector<std::unique_ptr<Buffer>>
      barrier_memory_;  // one element per stream that had a barrier
  NcclRanks nccl_;      // goes first
};

}  // namespace lockstep
