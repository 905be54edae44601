#pragma once
// Batch normalisation (Ioffe and Szegedy, arXiv 1502.03167), split where SyncBatchNorm has to
// step in: between local sums and their use.

#include "common/nn/layers.h"

namespace lockstep {

class BatchNorm2d;

/// The number of rows (values per channel) of a batch, as far as the host needs to know it.
enum class Rows { none, one, several };

inline Rows rows_of(int64_t count) {
  return count == 0 ? Rows::none : count == 1 ? Rows::one : Rows::several;
}

/// Merges the statistics of the part of a batch that one device sees into those of the whole batch.
class BatchStatistics {
 public:
  virtual ~BatchStatistics() = default;
  /// Turns the statistics [2C+1] of this device's `rows` rows (Kernels::batch_norm_statistics) into
  /// those of the whole batch, and returns how many rows that batch has.
  virtual Rows merge(const Tensor& statistics, int64_t rows, const BatchNorm2d& layer,
                     Context& context) = 0;
  /// Turns backward's local sums [2,C] into those of the whole batch.
  virtual void merge_sums(const Tensor& sums, const BatchNorm2d& layer, Context& context) = 0;
};

/// torch.nn.BatchNorm2d (eps 1e-5, momentum 0.1, affine, running statistics) on [N,H,W,C]; with
/// Activation::relu also the ReLU after it. In training it normalises with the statistics of the
/// batch and throws BadInput for a single value per channel; an empty batch changes nothing. The
/// batch is what this device sees, unless set_statistics() says otherwise. Parameters and
/// statistics are Real with any precision.
class BatchNorm2d : public Module {
 public:
  explicit BatchNorm2d(int64_t channels, Activation activation = Activation::none);
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;
  /// relu(normalise(x) + skip) in one pass: the end of a residual block. Its backward is backward()
  /// applied to the gradient that the ReLU let through.
  AnyTensor forward_add_relu(const AnyTensor& x, const AnyTensor& skip, Context& context);

  /// Sets how to get the statistics of the whole batch. Parameters, their names and the running
  /// statistics stay where they are.
  void set_statistics(std::shared_ptr<BatchStatistics> whole) { whole_ = std::move(whole); }

  int64_t channels() const { return channels_; }
  Activation activation() const { return activation_; }
  /// The number of training forward passes so far that moved the running statistics.
  int64_t batches_tracked() const { return batches_tracked_; }
  void set_batches_tracked(int64_t batches) { batches_tracked_ = batches; }

 private:
  AnyTensor normalize(const AnyTensor& x, const AnyTensor& skip, bool relu, Context& context);
  /// The values to normalise with (`norm` of Kernels::batch_norm_prepare), [2C+1].
  Tensor training_norm(const AnyTensor& x, Context& context);

  int64_t channels_;
  Activation activation_;
  Parameter& weight_;                       // [C]
  Parameter& bias_;                         // [C]
  ModelBuffer& running_mean_;               // [C]
  ModelBuffer& running_var_;                // [C]
  std::shared_ptr<BatchStatistics> whole_;  // null: the batch is what this device sees
  int64_t batches_tracked_ = 0;
};

/// The batch normalisations in `network`, itself included, in order of registration.
std::vector<BatchNorm2d*> batch_norms(Module& network);

}  // namespace lockstep
