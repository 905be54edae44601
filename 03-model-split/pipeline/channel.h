#pragma once
// How activations, or gradients, get from one stage of a pipeline to its neighbour.

#include <optional>
#include <vector>

#include "common/core/any_tensor.h"

namespace lockstep {

/// A ring of places in the receiver's memory. The sender's stream copies into a place and
/// continues; it waits only if the receiver has not yet emptied the place. First in, first out.
class Channel {
 public:
  /// At most `places` tensors may be under way or in use at the same time.
  Channel(Stream from, Stream to, size_t places) : from_(from), to_(to), ring_(places) {}
  /// Whether the two are on different devices.
  bool crosses() const { return &from_.device() != &to_.device(); }
  /// Bytes whose copy to another device has been enqueued so far.
  int64_t bytes_sent() const { return bytes_sent_; }
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// Allocates all places now, for tensors of Real of this shape. Without this call the first sends
  /// allocate them, and wait for all work that the receiver has been given so far.
  void reserve(const Shape& shape);

  /// Says whether the host has enqueued the work for which send() or receive() has to wait.
  bool can_send() const { return sent_ - released_ < ring_.size(); }
  bool can_receive() const { return received_ < sent_; }

  /// Makes the sender's stream wait until the next place has been emptied. send() does that too; a
  /// separate call allows the caller to time the wait.
  void await_place();
  /// Enqueues on the sender's stream a copy of the sender's x [n,...] into the next place, as soon
  /// as that place has been emptied. Notes the event for which receive() makes the receiver wait.
  /// All tensors have the same extents but the first; throws BadInput, with both shapes, if not.
  void send(const AnyTensor& x);
  /// Returns the oldest tensor not received yet. Later work on the receiver's stream may read it.
  AnyTensor receive();
  /// Says that the receiver has enqueued its last read of the oldest tensor received.
  void release();

 private:
  struct Place {
    AnyTensor memory{};
    Shape shape{};                   // of the tensor that is in it
    std::optional<Event> filled{};   // of the sender: the copy is complete
    std::optional<Event> emptied{};  // of the receiver: it has read what was there
  };

  void make_room(Place& place, const Shape& shape, ElementType type);

  Stream from_, to_;
  std::vector<Place> ring_;
  Shape last_{};                                   // of the tensor sent last
  size_t sent_ = 0, received_ = 0, released_ = 0;  // since the beginning
  int64_t bytes_sent_ = 0;
};

}  // namespace lockstep
