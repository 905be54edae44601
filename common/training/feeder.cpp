#include "common/training/feeder.h"

#include "common/core/device.h"

namespace lockstep {
namespace {

/// Copies rows first, first + stride, ... of `from` [batch, row_elements] side by side.
template <class T>
void copy_rows(Stream stream, const T* from, int64_t row_elements, const BatchPart& part, T* to) {
  if (part.stride == 1) {
    stream.copy(to, from + part.first * row_elements, part.count * row_elements * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < part.count; ++i) {
    stream.copy(to + i * row_elements, from + (part.first + i * part.stride) * row_elements,
                row_elements * sizeof(T));
  }
}

}  // namespace

Feeder::Feeder(Stream stream, const Dataset& set, size_t slots)
    : stream_(stream),
      height_(set.height),
      width_(set.width),
      channels_(set.channels),
      mean_(Real(set.mean)),
      stddev_(Real(set.stddev)),
      pinned_(stream.device().allocate_host(slots * sizeof(StepState))),
      copied_(slots) {}

std::vector<DeviceBatch> DeviceBatch::divide(const BatchSplit& micro_batches) const {
  std::vector<DeviceBatch> parts;
  for (const BatchPart& part : micro_batches.divide(labels.shape()[0])) {
    parts.push_back({.pixels = pixels.rows(part.first, part.count),
                     .labels = labels.rows(part.first, part.count),
                     .first = part.first});
  }
  return parts;
}

StepState* Feeder::pinned_copy(const StepState& state) {
  const size_t slot = next_slot_++ % copied_.size();
  if (copied_[slot]) copied_[slot]->synchronize();
  StepState* place = static_cast<StepState*>(pinned_.get()) + slot;
  *place = state;
  return place;
}

const DeviceBatch& Feeder::feed(const HostBatch& batch, Context& context) {
  const DeviceBatch& fed = feed(batch, {.count = batch.size}, context);
  retire(batch);
  return fed;
}

const DeviceBatch& Feeder::feed(const HostBatch& batch, const BatchPart& part, Context& context) {
  feed_state(batch, part, context);
  feed_images(batch, part);
  return feed_labels(batch, part);
}

void Feeder::feed_state(const HostBatch& batch, const BatchPart& part, Context& context) {
  StepState state = context.step();
  state.first_position = batch.global_first + part.first * batch.global_stride;
  state.position_stride = part.stride * batch.global_stride;
  const StepState* pinned = pinned_copy(state);
  stream_.copy(context.state().data(), pinned, sizeof(StepState));
  copied_[(next_slot_ - 1) % copied_.size()] = stream_.record();
}

const DeviceBatch& Feeder::feed_images(const HostBatch& batch, const BatchPart& part) {
  DeviceBatch& place = places_[part.count];
  if (!place.pixels.defined()) {
    place.pixels = ByteTensor::empty(stream_, {part.count, height_, width_, channels_});
  }
  copy_rows(stream_, batch.images, height_ * width_ * channels_, part, place.pixels.data());
  return place;
}

const DeviceBatch& Feeder::feed_labels(const HostBatch& batch, const BatchPart& part) {
  DeviceBatch& place = places_[part.count];
  if (!place.labels.defined()) place.labels = LabelTensor::empty(stream_, {part.count});
  copy_rows(stream_, batch.labels, 1, part, place.labels.data());
  return place;
}

AnyTensor Feeder::normalize(const DeviceBatch& batch, Context& context) const {
  const AnyTensor images = context.activation(batch.pixels.shape());
  context.kernels().normalize_images(stream_, batch.pixels, mean_, stddev_, images);
  return images;
}

void Feeder::retire(HostBatch batch) {
  retired_.push_back({std::move(batch), stream_.record()});
  while (retired_.size() > 1 && retired_.front().copied.done()) retired_.pop_front();
  if (retired_.size() > 2) {  // the host is two batches ahead: that is enough
    retired_.front().copied.synchronize();
    retired_.pop_front();
  }
}

}  // namespace lockstep
