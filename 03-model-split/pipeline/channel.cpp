#include "03-model-split/pipeline/channel.h"

#include "common/core/device.h"
#include "common/core/error.h"

namespace lockstep {

Channel::~Channel() {
  to_.wait(from_.record());  // the places are freed in the receiver's order
}

void Channel::reserve(const Shape& shape) {
  for (Place& place : ring_) make_room(place, shape, kTypeOf<Real>);
}

void Channel::make_room(Place& place, const Shape& shape, ElementType type) {
  const bool fits = place.memory.defined() && place.memory.type() == type &&
                    place.memory.elements() >= shape.elements();
  if (fits) return;
  place.memory = AnyTensor::empty(to_, shape, type);
  place.emptied = to_.record();
}

void Channel::await_place() {
  const Place& place = ring_[sent_ % ring_.size()];
  if (place.emptied) from_.wait(*place.emptied);
}

void Channel::send(const AnyTensor& x) {
  if (sent_ > 0) {
    Shape expected = last_;
    expected[0] = x.shape()[0];
    require(x.shape() == expected,
            "boundary from {} to {}: a tensor of {}, expected {} as before; give all micro-batches "
            "the same shape",
            from_.device().name(), to_.device().name(), x.shape().text(), expected.text());
  }
  last_ = x.shape();
  Place& place = ring_[sent_ % ring_.size()];
  make_room(place, x.shape(), x.type());
  place.shape = x.shape();
  // [task 03.3] boundary copy
  from_.wait(*place.emptied);
  from_.copy(place.memory.data(), x.data(), x.bytes());
  place.filled = from_.record();
  // [end 03.3]
  if (crosses()) bytes_sent_ += int64_t(x.bytes());
  ++sent_;
}

AnyTensor Channel::receive() {
  const Place& place = ring_[received_++ % ring_.size()];
  to_.wait(place.filled.value());
  return place.memory.range(0, place.shape);
}

void Channel::release() { ring_[released_++ % ring_.size()].emptied = to_.record(); }

}  // namespace lockstep
