#pragma once
// A call of one rank: what it does with which numbers, with whom, and what for.

#include <string>

#include "common/comm/sent_bytes.h"
#include "common/core/tensor.h"
#include "common/kernels/rank_sum.h"

namespace lockstep {

enum class Reduction { sum, average };

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

/// Bytes of one element.
int64_t size_of(ElementType type);
/// "f32", "f64" or "i64"
const char* name_of(ElementType type);

/// One call of one rank.
struct Call {
  enum class Op {
    all_reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    reduce,
    gather,
    scatter,
    send,
    receive,
    barrier
  };
  Op op = Op::barrier;
  Elements mine{};  // the rank's own share, or what is sent, received, reduced or broadcast
  Elements all{};   // of all ranks, W times mine; where only the root uses it, empty elsewhere
  int peer = 0;     // root, or the other side of send and receive
  Reduction reduction = Reduction::sum;
  std::string label{};  // whom it is for, "bn1"; may be empty
  Purpose purpose = Purpose::other;

  /// What must be the same on all ranks: "all_reduce of 87360 f32, sum", "broadcast of 10 i64, root
  /// 0", "all_gather of 21 f32 for bn1".
  std::string text() const;
  /// Adds numbers of all ranks up.
  bool reduces() const;
  /// Bytes that leave rank `rank` of `world_size` where the call goes round a ring, as over TCP
  /// (tcp_transport.cpp): all that one can say of a library that does not tell what it sends.
  int64_t ring_bytes(int rank, int world_size) const;
};

/// "all_reduce", "broadcast", ...
const char* name_of(Call::Op op);

}  // namespace lockstep
