#pragma once
// The ways to split a layer inside. N batch, H W image, P ranks.
//
//                  weights of a rank    forward                  backward
//   ColumnLinear   its outputs          -                        all-reduce of dx
//   RowLinear      its inputs           all-reduce, then bias    -
//   ColumnConv2d   its output channels  -                        all-reduce of dx
//   RowConv2d      its input channels   all-reduce, then bias    -
//   JoinChannels   none                 all-gather of y          -
//   TakeChannels   none                 -                        all-gather of dx
//
// An activation is either whole, with the same values on all ranks, or split: rank r has part r of
// P of its channels or features. Each layer takes its sizes from the layer `whole` that it
// replaces. Throws BadInput, naming that layer, where the split extent does not divide by P.

#include <map>
#include <string>
#include <vector>

#include "common/nn/layers.h"
#include "common/nn/optimizer.h"
#include "common/training/pass_collectives.h"

namespace lockstep {

/// The collectives of a layer in training so far, and the numbers that a rank put into them. The
/// bytes that the rank sent for them are computed from sizes.
struct Traffic {
  int64_t all_reduces = 0, all_gathers = 0;
  int64_t numbers = 0;
  double bytes = 0;
};

/// The ranks that share layers. All make the same passes, of the same samples, at the same time.
class SplitRanks {
 public:
  /// Passes enqueue their collectives on the stream `communication` and wait for the results.
  /// `comm` must outlive the passes.
  SplitRanks(Communicator& comm, Stream communication)
      : calls_(comm, communication), after_passes_(comm, communication) {}

  int rank() const { return comm().rank(); }
  int world_size() const { return comm().world_size(); }
  Communicator& comm() const { return calls_.comm(); }
  /// The P-th part of a layer's `total` outputs, inputs or channels.
  int64_t share(const Module& layer, int64_t total, const char* what) const;

  /// x becomes the sum of all ranks' x. Only enqueues; does nothing for a single rank.
  /// Numbers of 16 bits have been rounded before they are added: one device would round the sum.
  void all_reduce(const Module& layer, const AnyTensor& x, Context& context);
  /// Fills all [P...] with rank 0's `mine` [...], then rank 1's, ...
  void all_gather(const Module& layer, const AnyTensor& mine, const AnyTensor& all,
                  Context& context);
  /// In fp16: adds up all ranks' numbers; each rank knows only the gradients of its own weights.
  void add_overflows(const OverflowNumber& overflow, Context& context);
  /// Returns the health of every rank; a rank knows only its own weights. So all ranks stop in the
  /// same step if one has a gradient that is not finite.
  std::vector<HealthTensor> healths(const HealthTensor& mine, Context& context);

  const std::map<std::string, Traffic>& traffic() const { return traffic_; }  // by layer
  /// Seconds that training passes have waited for sums. Waits for the last one.
  double seconds_waited() { return calls_.seconds_waited(); }
  /// The part of seconds_waited() before the sums began: behind other messages, between threads.
  double seconds_queued() { return calls_.seconds_queued(); }

 private:
  PassCollectives calls_, after_passes_;  // waiting for the latter is not counted
  std::map<std::string, Traffic> traffic_;
};

/// A linear layer split by the rows of its weights [out,in]: x [N,in], y [N,out/P]. Its forward is
/// Linear's. In backward every rank computes what its outputs contribute to the input's gradient;
/// the sum is the whole gradient.
class ColumnLinear final : public Linear {
 public:
  ColumnLinear(const Linear& whole, SplitRanks& ranks);
  AnyTensor backward(const AnyTensor& dy, Context& context) override;

 private:
  SplitRanks& ranks_;
};

/// The same for a convolution, split by output channels: x [N,H,W,in], y [N,OH,OW,out/P].
class ColumnConv2d final : public Conv2d {
 public:
  ColumnConv2d(const Conv2d& whole, SplitRanks& ranks);
  AnyTensor backward(const AnyTensor& dy, Context& context) override;

 private:
  SplitRanks& ranks_;
};

/// A layer with split input and whole output. Its backward is Layer's: every rank has the whole
/// bias and computes its whole gradient. `Layer` is Linear or Conv2d.
template <class Layer>
class InputSplit : public Layer {
 public:
  /// Adds up the ranks' products, THEN adds the bias, once, THEN applies the activation. The halves
  /// of Layer's own forward are product(), and add_bias() for bias and activation.
  AnyTensor forward(const AnyTensor& x, Context& context) override;

 protected:
  template <class... Sizes>
  explicit InputSplit(SplitRanks& ranks, const Sizes&... sizes) : Layer(sizes...), ranks_(ranks) {}

 private:
  SplitRanks& ranks_;
};

/// Split by the columns of its weights [out,in]: x [N,in/P], y [N,out].
class RowLinear final : public InputSplit<Linear> {
 public:
  RowLinear(const Linear& whole, SplitRanks& ranks);
};

/// Split by input channels: x [N,H,W,in/P], y [N,OH,OW,out].
class RowConv2d final : public InputSplit<Conv2d> {
 public:
  RowConv2d(const Conv2d& whole, SplitRanks& ranks);
};

/// Comes between a layer with split outputs and one that is whole, or the reverse.
class ChannelLayer : public Module {
 public:
  explicit ChannelLayer(SplitRanks& ranks) : ranks_(ranks) {}

 protected:
  /// Joins [...,C/P] of every rank to [...,C].
  AnyTensor join(const AnyTensor& x, Context& context);
  /// Takes this rank's [...,C/P] from [...,C].
  AnyTensor take(const AnyTensor& x, Context& context) const;

 private:
  SplitRanks& ranks_;
};

/// Split to whole: x [...,C/P], y [...,C].
class JoinChannels final : public ChannelLayer {
 public:
  using ChannelLayer::ChannelLayer;
  AnyTensor forward(const AnyTensor& x, Context& context) override { return join(x, context); }
  AnyTensor backward(const AnyTensor& dy, Context& context) override { return take(dy, context); }
};

/// Whole to split: x [...,C], y [...,C/P].
class TakeChannels final : public ChannelLayer {
 public:
  using ChannelLayer::ChannelLayer;
  AnyTensor forward(const AnyTensor& x, Context& context) override { return take(x, context); }
  AnyTensor backward(const AnyTensor& dy, Context& context) override { return join(dy, context); }
};

}  // namespace lockstep
