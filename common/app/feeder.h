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

/// A part of a batch on a device.
struct DeviceBatch {
  ByteTensor pixels;   // [count, height, width, channels]
  LabelTensor labels;  // [count]
};

/// Copies parts of host batches to one device. The host never waits for a copy: it keeps the
/// batches (page-locked memory on CUDA) until the event behind their last copy is done. Parts of
/// the same size always lie at the same place, so that a captured step finds the next batch there.
class Feeder {
 public:
  /// `set` says how large images are and how pixels are normalised. The host waits when it is
  /// `slots` parts ahead of the stream.
  Feeder(Stream stream, const Dataset& set, size_t slots = 8);

  /// Enqueues the copy of `part` and of the pass's facts for kernels (into context.state()).
  /// `facts` says step, learning rate and loss weight; the positions are the part's. What it
  /// returns is overwritten, in stream order, when the next part of this size comes.
  const DeviceBatch& feed(const HostBatch& batch, const BatchPart& part, StepState facts,
                          Context& context);
  /// The same in pieces, for a model whose layers lie on several devices: each needs the facts, the
  /// first the images (labels undefined), the last the labels (images undefined).
  void feed_facts(const HostBatch& batch, const BatchPart& part, StepState facts, Context& context);
  const DeviceBatch& feed_images(const HostBatch& batch, const BatchPart& part);
  const DeviceBatch& feed_labels(const HostBatch& batch, const BatchPart& part);
  /// The images of a batch as the network takes them: [count, height, width, channels].
  Tensor normalize(const DeviceBatch& batch, Context& context) const;
  /// Keeps `batch` until the copies from it so far have ended. To be called when all of its parts
  /// have been fed.
  void retire(HostBatch batch);

 private:
  struct Retired {
    HostBatch batch;
    Event copied;
  };
  /// A place in host memory that no copy reads any more, holding `facts`.
  StepState* stage(const StepState& facts);

  Stream stream_;
  int64_t height_, width_, channels_;
  Real mean_, stddev_;
  std::map<int64_t, DeviceBatch> places_;  // by size
  std::deque<Retired> retired_;
  std::shared_ptr<void> staging_;             // StepState[slots]
  std::vector<std::optional<Event>> copied_;  // behind the last copy from each of them
  size_t next_slot_ = 0;
};

}  // namespace lockstep
