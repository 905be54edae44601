#pragma once
// DistributedDataParallel: one process per device, gradients reduced while backward still runs.

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "04-ddp/buckets.h"
#include "04-ddp/compression.h"
#include "04-ddp/replica.h"
#include "common/rendezvous/agreement.h"

namespace lockstep {

class OptionParser;

enum class ReplicaKind { bucketed, manual };
constexpr auto words_of(ReplicaKind) { return std::array{"bucketed", "manual"}; }

/// How large buckets are.
struct BucketOptions {
  double bucket_mb = -1;  // -1: 1 MiB, then 25 MiB

  void add_to(OptionParser& parser);
  BucketCaps caps() const { return bucket_mb == -1 ? BucketCaps() : BucketCaps::equal(bucket_mb); }
};

/// How whole replicas of a network reduce their gradients.
struct ReplicaOptions {
  ReplicaKind ddp = ReplicaKind::bucketed;
  AllReduceKind all_reduce = AllReduceKind::library;
  Compression compress = Compression::none;
  BucketOptions buckets{};
  /// Reduces nothing before backward has ended: the same sums, later.
  bool no_overlap = false;
  /// Sends zeros for a parameter without a gradient, instead of throwing an error.
  bool find_unused_parameters = false;
  /// Gives all ranks rank 0's running statistics before every training forward.
  bool broadcast_buffers = true;

  void add_to(OptionParser& parser);
};

/// A replica whose gradients are reduced in buckets while backward still runs. Mirrors
/// torch.nn.parallel.DistributedDataParallel.
///
/// Each bucket is multiplied by 1/W as soon as backward has completed the bucket. Then the
/// communication stream sums the bucket over the ranks, in the same bucket order on all ranks.
///
/// In a pass that is not the last contribution to a step (PassFacts: no_sync, accumulation)
/// gradients only add up on this rank.
class DistributedDataParallel final : public Replica {
 public:
  /// `parameters` are those of `module`, on the stream of its passes; they, `comm` and its group
  /// must outlive this object. Gives every rank rank 0's parameters and buffers. Throws BadInput,
  /// on all ranks, if the ranks' parameters differ.
  DistributedDataParallel(std::unique_ptr<Module> module, const FlatParameters& parameters,
                          Communicator& comm, const ExchangeTexts& exchange, Stream communication,
                          const ReplicaOptions& options = {});

  /// Later work on the stream of the passes finds the gradients of the whole batch. Throws
  /// BadInput, naming the parameters without a gradient, unless the options allow such parameters.
  AnyTensor backward(const AnyTensor& dy, Context& context) override;

  /// A single bucket is complete only when backward has ended.
  bool overlaps() const override { return !options_.no_overlap && buckets_.size() > 1; }

 private:
  void gradient_is_ready(size_t place, const Parameter& parameter);
  void reduce_complete_buckets();
  void reduce(const Bucket& bucket);
  void reduce_the_rest();

  ReplicaOptions options_;
  std::vector<Parameter*> in_order_;  // of completion: the reverse of registration
  std::vector<Bucket> buckets_;
  // The current backward.
  bool running_ = false;
  std::vector<bool> ready_;  // by place in in_order_
  size_t next_ = 0;          // the next bucket to be reduced
};

}  // namespace lockstep
