#pragma once
// DistributedDataParallel: one process per device, gradients reduced while backward still runs.

#include <memory>
#include <string>
#include <vector>

#include "04-ddp/buckets.h"
#include "04-ddp/replica.h"
#include "common/rendezvous/agreement.h"

namespace lockstep {

struct DdpOptions {
  BucketCaps caps{};
  AllReduceKind all_reduce = AllReduceKind::library;
  /// false: nothing is reduced before backward has ended. The same sums, later.
  bool overlap = true;
  /// Running statistics are rank 0's before every training forward.
  bool broadcast_buffers = true;
  /// A parameter without a gradient is sent as zeros, instead of as a mistake.
  bool find_unused_parameters = false;
};

/// A replica whose gradients are reduced in buckets while backward still runs. Mirrors
/// torch.nn.parallel.DistributedDataParallel.
///
/// Each bucket is multiplied by 1/W as soon as backward has completed it, and summed over the ranks
/// on the communication stream, bucket after bucket in the same order on all ranks.
///
/// In a pass that is not the last contribution to a step (PassFacts: no_sync, accumulation)
/// gradients only add up on this rank.
class DistributedDataParallel final : public Replica {
 public:
  /// `parameters` are those of `module`, on the stream of its passes; they, `comm` and its group
  /// must outlive this object. Gives every rank rank 0's parameters and buffers. Throws BadInput,
  /// on all ranks, if they do not have the same parameters.
  DistributedDataParallel(std::unique_ptr<Module> module, const FlatParameters& parameters,
                          Communicator& comm, const ExchangeTexts& exchange, Stream communication,
                          const DdpOptions& options = {});

  /// After this, on the stream of the passes, the gradients are those of the whole batch. Throws
  /// BadInput naming the parameters that got no gradient, unless that is allowed.
  Tensor backward(const Tensor& dy, Context& context) override;

  const std::vector<Bucket>& buckets() const { return buckets_; }
  /// A single bucket is complete only when backward has ended.
  bool overlaps() const override { return options_.overlap && buckets_.size() > 1; }

 private:
  void gradient_is_ready(size_t place, const Parameter& parameter);
  void reduce_complete_buckets();
  void reduce(const Bucket& bucket);
  void reduce_the_rest();

  DdpOptions options_;
  std::vector<Parameter*> in_order_;  // of completion: the reverse of registration
  std::vector<Bucket> buckets_;
  // The current backward.
  bool running_ = false;
  std::vector<bool> ready_;  // by place in in_order_
  size_t next_ = 0;          // the next bucket to be reduced
};

}  // namespace lockstep
