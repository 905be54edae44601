#pragma once
// Residual layers: what they compute is added to their input.

#include "common/nn/batch_norm.h"

namespace lockstep {

/// The residual block of ResNet-18 and 34 (He et al., arXiv 1512.03385). It is
/// relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x)), 3x3 convolutions with bias. The shortcut is
/// x itself, or conv3(x), 1x1, where channels or size change (stride > 1). Parameters are named and
/// registered as in the book "Dive into Deep Learning": conv1, conv2, [conv3], bn1, bn2.
class Residual final : public Module {
 public:
  Residual(int64_t in_channels, int64_t out_channels, int64_t stride);
  /// With these convolutions; conv3 is null where the shortcut is x itself. bn1 has conv1's
  /// channels: only a part of the block's channels if conv1 and conv2 are split over devices.
  Residual(std::unique_ptr<Conv2d> conv1, std::unique_ptr<Conv2d> conv2,
           std::unique_ptr<Conv2d> conv3);
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;

  const Conv2d& conv1() const { return conv1_; }
  const Conv2d& conv2() const { return conv2_; }
  const Conv2d* conv3() const { return conv3_; }  // null where the shortcut is x itself

 private:
  Conv2d& conv1_;
  Conv2d& conv2_;
  Conv2d* conv3_;
  BatchNorm2d& bn1_;
  BatchNorm2d& bn2_;
};

/// x + inner(x) in steps 0, 2, 4, ... and in evaluation. Other steps give x alone, and leave the
/// inner module's parameters without a gradient. This is the simplest form of stochastic depth
/// (Huang et al., arXiv 1603.09382), by turns instead of by chance. So all ranks leave out the
/// same. The inner module's output has x's shape.
class EverySecondStep final : public Module {
 public:
  explicit EverySecondStep(std::unique_ptr<Module> inner);
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;

 private:
  Module& inner_;
};

}  // namespace lockstep
