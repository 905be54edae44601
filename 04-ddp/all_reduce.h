#pragma once
// The all-reduce, written out: what a library does internally.

#include <array>
#include <cstdint>
#include <string>

#include "common/comm/communicator.h"

namespace lockstep {

enum class AllReduceKind {
  ring,     // every rank passes parts on to its right neighbour: 2 (W-1)/W of x from each rank
  naive,    // rank 0 adds up and hands out: it sends W-1 times x, all others once
  library,  // the communicator's own
};
constexpr auto words_of(AllReduceKind) { return std::array{"ring", "naive", "library"}; }

/// Replaces x by the sum of all ranks' x, with the same bits on all ranks. The communicator counts
/// the bytes that this rank sends as bytes of gradients.
class AllReduce {
 public:
  /// `comm` must outlive this object; all calls go to `stream`.
  AllReduce(Communicator& comm, AllReduceKind kind, Stream stream)
      : comm_(comm), kind_(kind), stream_(stream) {}

  /// Enqueues the sum of x [n].
  void operator()(const Tensor& x);

 private:
  void ring(const Tensor& x);
  void naive(const Tensor& x);
  /// Part `number` of the W parts of x, of nearly equal length. Numbers wrap around the ring.
  Tensor part(const Tensor& x, int number) const;
  /// Memory in which to receive `count` numbers. The next call returns the same memory.
  Tensor scratch(int64_t count);
  void send(const Tensor& x, int to) { comm_.send(stream_, x, to); }
  void receive(const Tensor& x, int from) { comm_.receive(stream_, x, from); }

  Communicator& comm_;
  AllReduceKind kind_;
  Stream stream_;
  Tensor scratch_;
};

}  // namespace lockstep
