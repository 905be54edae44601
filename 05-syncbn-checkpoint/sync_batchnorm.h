#pragma once
// Batch normalisation over the batches of all ranks.
//
// A rank that normalises its part of the batch by itself computes another function than one device
// that has the whole batch, and its gradient is off by some percent. Synchronised, the function is
// the same, and so are gradients, running statistics and weights.
//
// Forward needs the mean and variance of all ranks' rows. Each rank sends its means, its M2s (sums
// of squared distances from the means) and its number of rows: 2C+1 numbers in ONE all-gather. An
// all-reduce cannot do it: parts of a batch differ in size, and the merge (BatchNormMerge) is not a
// sum. Sums of x and of x^2 could be reduced, but their difference loses all digits where the mean
// is much larger than the spread: at mean 1e4 and spread 1 the variance in float32 is nonsense;
// merged it is right to 1e-7. Merged in rank order it has the same bits on every rank.
//
// Backward needs sum(dy) and sum(dy (x - mean)) over all rows: 2C numbers in ONE all-reduce. Each
// rank back-propagates the loss of its own samples, so dx is the gradient of the sum of all ranks'
// losses. The gradients of weight and bias stay local: whoever averages gradients over the ranks
// (DDP) does so for these, too.
//
// Mirrors torch.nn.SyncBatchNorm (which gathers 1/std in place of M2, and runs on GPUs only).

#include <memory>

#include "common/comm/communicator.h"
#include "common/nn/batch_norm.h"
#include "common/training/pass_collectives.h"
#include "common/training/training_log.h"

namespace lockstep {

/// Normalises a batch that is dealt to the ranks of a group. Parts may be unequal or empty: a rank
/// without samples still makes its passes, with tensors of no rows. All ranks run the same layers
/// in the same order. A single rank, and evaluation, communicate nothing.
///
/// All calls go to the stream `communication`; give DDP's stream, so that layers and buckets reach
/// the communicator in one order. A layer waits for its calls on its own stream. The host waits
/// only where a rank has fewer than two rows: it must know how many the others have. If there is
/// one row in total, that is an error on all ranks: each has fewer than two then.
class SyncBatchNorm final : public BatchStatistics {
 public:
  /// `comm` must outlive the passes.
  SyncBatchNorm(Communicator& comm, Stream communication) : calls_(comm, communication) {}

  /// All-gathers the ranks' statistics, [2C+1] each, and merges them.
  Rows merge(const Tensor& statistics, int64_t rows, const BatchNorm2d& layer,
             Context& context) override;
  /// Replaces this rank's sums over its rows, [2, C], by those over all ranks' rows. There is one
  /// all-reduce on the stream `communication`, after the pass's work so far and before its next
  /// work. The host does not wait. A single rank has the sums already.
  void merge_sums(const Tensor& sums, const BatchNorm2d& layer, Context& context) override;

  /// How many layers use this object.
  int layers() const { return layers_; }
  /// Seconds that this rank's passes have waited for calls so far. Waits for the last call.
  double seconds_waited() { return calls_.seconds_waited(); }
  /// The ranks that normalise together; counts the bytes they send (Purpose::statistics).
  Communicator& comm() const { return calls_.comm(); }
  /// The bytes that a rank had to send so far, by sizes. They are (W-1) times the statistics of
  /// each forward, 2 (W-1)/W times the sums of its backward.
  double bytes_predicted() const { return bytes_predicted_; }

 private:
  friend std::shared_ptr<SyncBatchNorm> convert_sync_batchnorm(Module&, Communicator&, Stream);
  template <class Work>
  void communicate(const BatchNorm2d& layer, Context& context, Work work);

  PassCollectives calls_;
  int layers_ = 0;
  double bytes_predicted_ = 0;
};

/// Synchronises every BatchNorm2d of `network`, wrapped or not; returns the object they share.
/// Parameters, running statistics and their names stay: FlatParameters and files remain valid.
/// Mirrors torch.nn.SyncBatchNorm.convert_sync_batchnorm.
std::shared_ptr<SyncBatchNorm> convert_sync_batchnorm(Module& network, Communicator& comm,
                                                      Stream communication);

/// The same; `comm` must outlive the passes. If `comm` is null, each layer sees its own rank's part
/// only, as before, and the result is null.
inline std::shared_ptr<SyncBatchNorm> convert_sync_batchnorm(
    Module& network, const std::shared_ptr<Communicator>& comm, Stream communication) {
  return comm ? convert_sync_batchnorm(network, *comm, communication) : nullptr;
}

/// Adds the cost of synchronising per step to the summary and the metrics.
void report(SyncBatchNorm& synchronised, TrainingLog& log);

}  // namespace lockstep
