#pragma once
// Batch normalisation (Ioffe and Szegedy, arXiv 1502.03167), split where SyncBatchNorm has to
// step in: between local sums and their use.

#include "common/nn/layers.h"

namespace lockstep {

/// torch.nn.BatchNorm2d (eps 1e-5, momentum 0.1, affine, running statistics) on [N,H,W,C]; with
/// Activation::relu the ReLU behind it. In training it normalises with the statistics of the batch
/// it sees and throws BadInput for a single value per channel.
class BatchNorm2d : public Module {
 public:
  explicit BatchNorm2d(int64_t channels, Activation activation = Activation::none);
  Tensor forward(const Tensor& x, Context& context) override;
  Tensor backward(const Tensor& dy, Context& context) override;
  /// relu(normalise(x) + skip) in one pass: the end of a residual block. Its backward is
  /// backward() of the gradient that the ReLU let through.
  Tensor forward_add_relu(const Tensor& x, const Tensor& skip, Context& context);

  int64_t channels() const { return channels_; }
  Activation activation() const { return activation_; }
  /// Training forwards so far that moved the running statistics.
  int64_t batches_tracked() const { return batches_tracked_; }
  void set_batches_tracked(int64_t batches) { batches_tracked_ = batches; }

 protected:
  /// Turns `statistics` [2,C] (mean, M2) of this device's `count` rows into those of the whole
  /// batch and returns its number of rows. Here: the batch is what this device sees.
  virtual int64_t merge_statistics(const Tensor& statistics, int64_t count, Context& context);
  /// Turns backward's local sums [2,C] into those of the whole batch.
  virtual void merge_sums(const Tensor& sums, Context& context);

 private:
  Tensor normalize(const Tensor& x, const Tensor& skip, bool relu, Context& context);
  /// [2,C]: mean and 1/standard deviation to normalise with; `count` becomes the batch's rows.
  Tensor training_norm(const Tensor& x, int64_t& count, Context& context);

  int64_t channels_;
  Activation activation_;
  Parameter& weight_;          // [C]
  Parameter& bias_;            // [C]
  ModelBuffer& running_mean_;  // [C]
  ModelBuffer& running_var_;   // [C]
  int64_t batches_tracked_ = 0;
};

}  // namespace lockstep
