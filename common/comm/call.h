#pragma once
// A call of one rank: what it does with which numbers, with whom, and what for.

#include <cstdint>
#include <string>

#include "common/core/tensor.h"

namespace lockstep {

enum class Reduction { sum, average };

/// What a call is for: its bytes are counted apart from others' (SentBytes).
enum class Purpose { other, gradients, parameters, statistics, activations };

/// The numbers that calls carry.
enum class ElementType { f32, f64, i64 };
/// Bytes of one element.
int64_t size_of(ElementType type);
/// "f32", "f64" or "i64"
const char* name_of(ElementType type);

/// `count` numbers in device memory, as a collective sees them. Made from a tensor, whose device it
/// keeps; null for memory that is no tensor's.
struct Elements {
  void* data = nullptr;
  int64_t count = 0;
  ElementType type = ElementType::f32;
  const Device* device = nullptr;

  Elements() = default;
  Elements(void* data, int64_t count, ElementType type, const Device* device = nullptr)
      : data(data), count(count), type(type), device(device) {}
  Elements(const BasicTensor<float>& x)
      : Elements(x.data(), x.elements(), ElementType::f32, &x.home().device()) {}
  Elements(const BasicTensor<double>& x)
      : Elements(x.data(), x.elements(), ElementType::f64, &x.home().device()) {}
  Elements(const BasicTensor<int64_t>& x)
      : Elements(x.data(), x.elements(), ElementType::i64, &x.home().device()) {}

  /// `count` elements from element `first` on.
  Elements part(int64_t first, int64_t count) const;
};

/// One call of one rank.
struct Call {
  enum class Op {
    all_reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    reduce,
    send,
    receive,
    barrier
  };
  Op op = Op::barrier;
  Elements mine{};  // the rank's own share, or what is sent, received, reduced or broadcast
  Elements all{};   // of all ranks, W times mine
  int peer = 0;     // root, or the other side of send and receive
  Reduction reduction = Reduction::sum;
  std::string label{};  // whom it is for, "bn1"; may be empty
  Purpose purpose = Purpose::other;

  /// What must be the same on all ranks: "all_reduce of 87360 f32, sum", "broadcast of 10 i64, root
  /// 0", "all_gather of 21 f32 for bn1".
  std::string text() const;
  /// The same as one number, without the label.
  uint64_t number() const;
  /// Adds numbers of all ranks up.
  bool reduces() const;
  /// Of two ranks, not of all.
  bool is_transfer() const { return op == Op::send || op == Op::receive; }
  /// Bytes that leave rank `rank` of `world_size` where the call goes round a ring, as over TCP
  /// (tcp_transport.cpp): all that one can say of a library that does not tell what it sends.
  int64_t ring_bytes(int rank, int world_size) const;
};

/// "all_reduce", "broadcast", ...
const char* name_of(Call::Op op);

/// Numbers `first` to `first + count - 1` of a message that goes round a ring.
struct RingPart {
  int64_t first, count;
};

/// Part `number` of a message of `count` numbers, cut into `world_size` parts of nearly equal
/// length, one per rank. Parts are counted round the ring: number -1 is the last one.
inline RingPart ring_part(int64_t count, int number, int world_size) {
  const int64_t place = ((number % world_size) + world_size) % world_size;
  const int64_t first = count * place / world_size;
  return {first, count * (place + 1) / world_size - first};
}

}  // namespace lockstep
