#pragma once
// Batches onto a device: asynchronous copies, then bytes to numbers.

#include <deque>
#include <map>
#include <memory>

#include "common/data/batch_parts.h"
#include "common/data/dataset.h"
#include "common/data/loader.h"
#include "common/nn/context.h"

namespace lockstep {

/// A batch, or a part of one, on a device.
struct DeviceBatch {
  ByteTensor pixels;   // [count, height, width, channels]
  LabelTensor labels;  // [count]
  int64_t first = 0;   // its first sample in what was fed

  /// Its micro-batches, in the same memory: consecutive samples each.
  std::vector<DeviceBatch> divide(const BatchSplit& micro_batches) const;
};

/// Copies host batches, or parts of them, to one device. The host never waits for a copy: it keeps
/// the batches (page-locked memory on CUDA) until the event after their last copy is done. Parts of
/// the same size are always at the same address, so that a captured step finds the next batch
/// there.
class Feeder {
 public:
  /// `set` says how large images are and how pixels are normalised. The host waits when it is
  /// `slots` parts ahead of the stream.
  Feeder(Stream stream, const Dataset& set, size_t slots = 8);

  /// Enqueues the copy of a batch. Also copies what kernels need to know about the batch to
  /// context.state(): context.step() and the places of the samples. The returned batch is
  /// overwritten, in stream order, when the next batch of this size comes.
  const DeviceBatch& feed(const HostBatch& batch, Context& context);
  /// The same for a part of a batch. Call retire() when the last part has been fed.
  const DeviceBatch& feed(const HostBatch& batch, const BatchPart& part, Context& context);
  /// The same in pieces, for a model with layers on several devices. Each device needs the state,
  /// the first one the images (labels undefined), the last one the labels (images undefined).
  void feed_state(const HostBatch& batch, const BatchPart& part, Context& context);
  const DeviceBatch& feed_images(const HostBatch& batch, const BatchPart& part);
  const DeviceBatch& feed_labels(const HostBatch& batch, const BatchPart& part);
  /// The images of a batch as the network takes them: [count, height, width, channels].
  AnyTensor normalize(const DeviceBatch& batch, Context& context) const;
  /// Keeps `batch` until the copies from it so far have ended.
  void retire(HostBatch batch);

 private:
  struct Retired {
    HostBatch batch;
    Event copied;
  };
  /// A place in host memory that no copy reads any more, holding `state`.
  StepState* pinned_copy(const StepState& state);

  Stream stream_;
  int64_t height_, width_, channels_;
  Real mean_, stddev_;
  std::map<int64_t, DeviceBatch> places_;  // by size
  std::deque<Retired> retired_;
  std::shared_ptr<void> pinned_;              // StepState[slots]
  std::vector<std::optional<Event>> copied_;  // after the last copy from each slot
  size_t next_slot_ = 0;
};

}  // namespace lockstep
