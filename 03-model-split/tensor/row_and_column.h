#pragma once
// The ways to split a layer inside. N batch, H W image, P ranks.
//
//                  weights of a rank    forward                  backward
//   ColumnLinear   its outputs          -                        all-reduce of dx
//   RowLinear      its inputs           all-reduce, then bias    -
//   ColumnConv2d   its output channels  -                        all-reduce of dx
//   RowConv2d    its input channels   all-reduce, then bias    -
//   JoinChannels   none                 all-gather of y          -
//   TakeChannels   none                 -                        all-gather of dx
//
// Each takes its name and sizes from the layer `whole` that it replaces. Throws BadInput, naming
// that layer, where the split extent does not divide by P.

#include <optional>

#include "03-model-split/tensor/parallel_layer.h"
#include "common/nn/residual.h"

namespace lockstep {

/// Whole input, split output. In backward every rank computes what its own outputs contribute to
/// the input's gradient; the sum is the whole gradient. `Shard` is Linear or Conv2d.
template <class Shard>
class OutputSplit : public ParallelLayer {
 public:
  Tensors forward(const Tensors& x, const Contexts& contexts) override;
  Tensors backward(const Tensors& dy, const Contexts& contexts) override;
  Traffic predicted(const Shape& x) const override { return one_all_reduce(x.elements()); }

 protected:
  using ParallelLayer::ParallelLayer;
  std::vector<Shard*> shards_;
};

/// A linear layer split by the rows of its weights [out,in]: x [N,in], y [N,out/P].
class ColumnLinear final : public OutputSplit<Linear> {
 public:
  ColumnLinear(const Linear& whole, const RankModules& trees);
};

/// A convolution split by output channels: x [N,H,W,in], y [N,OH,OW,out/P].
class ColumnConv2d final : public OutputSplit<Conv2d> {
 public:
  ColumnConv2d(const Conv2d& whole, const RankModules& trees);
  /// The shape of a rank's output for an input of shape x.
  Shape output(const Shape& x) const { return shards_[0]->window(x).output(); }
};

/// Split input, whole output. The output is the sum of the ranks' products, THEN the bias, once,
/// THEN the activation. Every rank has the whole bias and computes its whole gradient.
template <class Shard>
class InputSplit : public ParallelLayer {
 public:
  /// x[r] is rank r's part of the input; all y[r] are the whole output. A shard's product() and
  /// add_bias(), bias and activation, are the halves of its forward.
  Tensors forward(const Tensors& x, const Contexts& contexts) override;
  Tensors backward(const Tensors& dy, const Contexts& contexts) override;

 protected:
  using ParallelLayer::ParallelLayer;
  std::vector<Shard*> shards_;
};

/// A linear layer split by the columns of its weights [out,in]: x [N,in/P], y [N,out].
class RowLinear final : public InputSplit<Linear> {
 public:
  RowLinear(const Linear& whole, const RankModules& trees);
  Traffic predicted(const Shape& x) const override;
};

/// A convolution split by input channels: x [N,H,W,in/P], y [N,OH,OW,out].
class RowConv2d final : public InputSplit<Conv2d> {
 public:
  RowConv2d(const Conv2d& whole, const RankModules& trees);
  Traffic predicted(const Shape& x) const override;
};

/// Comes between a layer with split outputs and one that is whole, or the reverse.
class ChannelLayer : public ParallelLayer {
 protected:
  using ParallelLayer::ParallelLayer;
  /// [...,C/P] of every rank becomes [...,C] on all of them.
  Tensors join(const Tensors& x, const Contexts& contexts);
  /// Each rank takes its [...,C/P] of [...,C].
  Tensors take(const Tensors& x, const Contexts& contexts) const;
};

/// Split to whole: x [...,C/P], y [...,C].
class JoinChannels final : public ChannelLayer {
 public:
  using ChannelLayer::ChannelLayer;
  Tensors forward(const Tensors& x, const Contexts& contexts) override { return join(x, contexts); }
  Tensors backward(const Tensors& dy, const Contexts& contexts) override {
    return take(dy, contexts);
  }
  Traffic predicted(const Shape& x) const override {
    return one_all_gather(world_size() * x.elements());
  }
};

/// Whole to split: x [...,C], y [...,C/P].
class TakeChannels final : public ChannelLayer {
 public:
  using ChannelLayer::ChannelLayer;
  Tensors forward(const Tensors& x, const Contexts& contexts) override { return take(x, contexts); }
  Tensors backward(const Tensors& dy, const Contexts& contexts) override {
    return join(dy, contexts);
  }
  Traffic predicted(const Shape& x) const override { return one_all_gather(x.elements()); }
};

/// A residual block: conv1 is split by output channels, conv2 by input channels, and bn1 works on
/// the rank's channels; the shortcut and bn2 are whole.
class ParallelResidual final : public ParallelLayer {
 public:
  ParallelResidual(const Residual& whole, const RankModules& trees);
  /// x and y are whole.
  Tensors forward(const Tensors& x, const Contexts& contexts) override;
  Tensors backward(const Tensors& dy, const Contexts& contexts) override;
  Traffic traffic() const override;
  Traffic predicted(const Shape& x) const override;

 private:
  ColumnConv2d conv1_;
  RowConv2d conv2_;
  std::optional<LocalLayer> conv3_;
  std::optional<LocalLayer> bn1_;  // in the order of the parameters, after conv3
  std::vector<BatchNorm2d*> bn2_;
  std::vector<std::unique_ptr<Relu>> relu_;  // fused into bn2's forward
};

}  // namespace lockstep
