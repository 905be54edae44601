#pragma once
// Sharded data parallel: the ranks divide what every rank of stage 04 keeps whole.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "04-ddp/replica.h"
#include "06-fully-sharded/unit.h"
#include "common/comm/process_group.h"
#include "common/nn/init.h"
#include "common/nn/optimizer.h"
#include "common/rendezvous/agreement.h"

namespace lockstep {

class OptionParser;

struct ShardingOptions {
  ShardKind kind = ShardKind::parameters;
  UnitSize unit{};
  /// How many units are being gathered while another unit computes.
  int prefetch = 1;
  /// false: gathered parameters stay from forward to backward.
  bool reshard_after_forward = true;
  MessageTypes messages{};
  /// The precision in which layers compute.
  Precision precision = Precision::real;
  /// Gives all ranks rank 0's running statistics before every training forward.
  bool broadcast_buffers = true;

  void add_to(OptionParser& parser);
};

/// One rank's part of a network whose parameters, gradients and optimizer state the ranks share
/// out, as far as the kind says. Mirrors torch.distributed.fsdp (Zhao et al., arXiv 2304.11277) and
/// ZeRO (arXiv 1910.02054).
///
/// In backward a unit's gradients are averaged as soon as the unit has made all. Meanwhile backward
/// goes on with the units in front. Each rank then updates its own shard. Losses must be weighted
/// as for a Replica, and the loss becomes the mean over the global batch as there.
///
/// In a pass that is not the last contribution to a step (PassFacts) nothing is reduced: every unit
/// keeps its whole gradients.
class FullyShardedDataParallel final : public Module {
 public:
  /// `network` is a Sequential. `comm` must outlive this object. Throws BadInput, on all ranks, if
  /// the ranks' networks differ. `replicas` are other groups' ranks with the same shards, over
  /// which gradients and loss are averaged, too (stage 07).
  FullyShardedDataParallel(std::unique_ptr<Module> network, Stream passes, Communicator& comm,
                           const ExchangeTexts& exchange, Stream communication,
                           const ShardingOptions& options, Communicator* replicas = nullptr);
  /// Units give their memory back after their messages, so units are destroyed before messages.
  ~FullyShardedDataParallel() override { release_children(); }
  FullyShardedDataParallel(const FullyShardedDataParallel&) = delete;
  FullyShardedDataParallel& operator=(const FullyShardedDataParallel&) = delete;

  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;

  /// Call it when every rank has updated its shard. Whole parameters that are kept get the other
  /// shards, unit after unit while the next forward begins; sharded ones are gathered when used.
  void gather_parameters();
  /// Gives all ranks rank 0's running statistics, if a pass has changed them.
  void broadcast_buffers();

  /// lockstep::initialize(), a unit at a time.
  void initialize(Initializer initializer, uint64_t seed);
  /// Calls set(unit) for one unit after another. set() writes the unit's whole values on every
  /// rank; only one unit's whole values are there at a time.
  void load_units(const std::function<void(Unit&)>& set);
  /// Calls use(unit) for one unit after another. use() may read the unit's whole values on the
  /// host. All ranks call this.
  void visit_units(const std::function<void(Unit&)>& use);

  /// The numbers that this rank updates, a range per unit.
  std::vector<UpdatedRange> shards() const;
  /// The optimizer of this rank's shards. Its zero_gradients() zeroes whole gradients that are
  /// kept, and the loss. This object must outlive it, and what clip_by_norm() returns.
  Optimizer optimizer(const OptimizerRule& rule) const;
  /// Scales the gradients by the norm of all ranks' shards together.
  ClipByNorm clip_by_norm(double most) const;
  /// Replaces `squares` [1], the sum over this rank's shards, by the sum over all numbers: for a
  /// norm over all shards. The passes make `squares` and wait for the result; the message goes over
  /// the communication stream. Where nothing is shared out, `squares` has all numbers already.
  void sum_over_shards(const Tensor& squares) const;
  const std::vector<Unit*>& units() const { return units_; }
  const FlatBuffers& running_statistics() const { return buffers_; }

  /// [1], the loss of this rank's samples; after the last backward the mean over the global batch.
  Tensor loss() const { return loss_and_marks_.range(0, {1}); }
  /// overflow() is the optimizer's `overflow` [1] for fp16, else undefined. After a step's last
  /// backward it is the sum over all ranks. own_health() says whether this rank's contribution, its
  /// loss included, was finite.
  const Tensor& overflow() const { return overflow_.number(); }
  const HealthTensor& own_health() const { return own_health_; }
  /// The number of learnt values.
  int64_t count();
  const ShardingOptions& options() const { return options_; }
  /// The ranks; counts the bytes sent in training (Purpose::parameters and gradients).
  const Communicator& comm() const { return messages_.comm; }
  /// The times of the steps so far. Exposed is the time in which the passes waited for a message.
  /// Waits for the last step.
  StepTimes times(int64_t steps);
  /// Seconds in which training passes have waited: for messages of comm(), and for those to
  /// replicas. Their sum is the exposed time. Both wait for the last step.
  double seconds_waited();
  double seconds_waited_for_replicas();

 private:
  std::vector<Unit*> make_units(Layers layers, UnitSize size);
  void fetch(size_t unit, int direction);
  void average_loss();
  bool scales_loss() const { return options_.precision == Precision::fp16; }

  ShardingOptions options_;
  UnitMessages messages_;
  std::vector<Unit*> units_;
  FlatBuffers buffers_;
  RunningStatistics running_statistics_;
  std::optional<RunningStatistics> statistics_of_replicas_;
  Tensor loss_and_marks_;  // [1 + parameters], in fp16 [1 + parameters + 1]: overflow_
  GradientMarks marks_;    // in the order of the units' in_order()
  HealthTensor own_health_;
  OverflowNumber overflow_;  // for fp16
  /// The health of this rank's gradients: own_health_. But in fp16 a gradient that is not finite
  /// skips the step, and nothing has failed.
  HealthTensor gradient_health_;
  StepStateTensor state_;  // of the current pass
  bool in_step_ = false;   // a pass has begun whose reduction has not ended
};

// --- --load and --save, a unit at a time: no rank has the whole network --------------------------

/// Rank 0 reads the file, a parameter at a time, and sends each unit's values to all ranks, which
/// keep their part. Errors as in lockstep::load_weights(), on all ranks. Does nothing if the path
/// is empty.
void load_weights(ProcessGroup& group, Communicator& comm, const std::string& path,
                  FullyShardedDataParallel& network);

/// Gathers one unit after another on the devices; rank 0 keeps them in host memory, and writes the
/// file that stage 01 and PyTorch read. All ranks call it.
void save_weights(ProcessGroup& group, const std::string& path, FullyShardedDataParallel& network);

}  // namespace lockstep
