#pragma once
// The layers, each as in torch.nn, on NHWC activations. N batch, H W image, C channels, F features.

#include "common/nn/module.h"

namespace lockstep {

enum class Activation { none, relu };  // what is fused after a layer

/// torch.nn.Conv2d with a square kernel and a bias. [N,H,W,in] to [N,OH,OW,out].
class Conv2d : public Module {
 public:
  struct Options {
    int64_t kernel = 1, stride = 1, padding = 0;
  };
  Conv2d(int64_t in_channels, int64_t out_channels, Options options);
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;
  /// forward() in two halves: product() is the convolution without the bias, [N,OH,OW,out], and
  /// add_bias() adds the bias in place. Between the two, the products of several layers can be
  /// added up.
  AnyTensor product(const AnyTensor& x, Context& context);
  void add_bias(const AnyTensor& y, Context& context);
  void skip_input_gradient() override { input_gradient_ = false; }

  int64_t in_channels() const { return in_channels_; }
  int64_t out_channels() const { return out_channels_; }
  const Options& options() const { return options_; }
  /// The sizes of this convolution over x, [N,H,W,in].
  Window2d window(const Shape& x) const;

 private:
  AnyTensor convolve(const AnyTensor& x, const Tensor& bias, Context& context);

  int64_t in_channels_, out_channels_;
  Options options_;
  bool input_gradient_ = true;
  Parameter& weight_;  // [out, kernel, kernel, in]
  Parameter& bias_;    // [out]
};

/// torch.nn.Linear: y = x W^T + b. [N,in] to [N,out].
class Linear : public Module {
 public:
  Linear(int64_t in_features, int64_t out_features, Activation activation = Activation::none);
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;
  /// forward() in two halves, as in Conv2d: first x W^T, [N,out], then the bias and the activation.
  AnyTensor product(const AnyTensor& x, Context& context);
  void add_bias(const AnyTensor& y, Context& context);
  void skip_input_gradient() override { input_gradient_ = false; }

  int64_t in_features() const { return in_features_; }
  int64_t out_features() const { return out_features_; }
  Activation activation() const { return activation_; }

 private:
  int64_t in_features_, out_features_;
  Activation activation_;
  bool input_gradient_ = true;
  Parameter& weight_;  // [out, in]
  Parameter& bias_;    // [out]
};

/// torch.nn.MaxPool2d without padding. The ReLU that follows it in the seed network is fused. It
/// works on a quarter of the pixels and needs no memory of its own.
class MaxPool2d final : public Module {
 public:
  /// `stride` 0 means the kernel's size.
  explicit MaxPool2d(int64_t kernel, Activation activation = Activation::none, int64_t stride = 0);
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;

 private:
  int64_t kernel_, stride_;
  Activation activation_;
};

/// torch.nn.AdaptiveAvgPool2d: [N,H,W,C] to [N,height,width,C].
class AdaptiveAvgPool2d final : public Module {
 public:
  AdaptiveAvgPool2d(int64_t height, int64_t width) : height_(height), width_(width) {}
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;

 private:
  int64_t height_, width_;
};

/// torch.nn.ReLU
class Relu final : public Module {
 public:
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;
};

/// torch.nn.Dropout: every element is 0 with probability p, else scaled by 1/(1-p). Identity in
/// evaluation. The mask comes from counters (bodies/dropout.inl). So it depends on the sample's
/// place in the global batch and not on how the batch is split.
class Dropout : public Module {
 public:
  Dropout(Real probability, uint32_t seed) : Dropout(probability, seed, false) {}
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;
  /// Sets that the input begins at feature (channel) `first` of the input of a whole layer of this
  /// name. The mask is then the same part of the whole layer's mask.
  void set_first_feature(int64_t first) { first_feature_ = first; }

 protected:
  Dropout(Real probability, uint32_t seed, bool whole_channels);

 private:
  /// x as [N, everything else]; x itself if one number decides for a whole channel.
  AnyTensor masked_view(const AnyTensor& x) const;

  Real probability_;
  uint32_t seed_;
  bool whole_channels_;
  int64_t first_feature_ = 0;
};

/// torch.nn.Dropout2d: the same with one decision per sample and channel of [N,H,W,C].
class Dropout2d final : public Dropout {
 public:
  Dropout2d(Real probability, uint32_t seed) : Dropout(probability, seed, true) {}
};

/// torch.nn.Flatten: [N,H,W,C] to [N, C H W], in PyTorch's order, so that the weights of the linear
/// layer after it are interchangeable.
class Flatten final : public Module {
 public:
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;
};

/// torch.nn.LogSoftmax over the last extent of [N,K]. The output is Real with any precision.
class LogSoftmax final : public Module {
 public:
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;
};

}  // namespace lockstep
