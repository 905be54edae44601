#pragma once
// Gradients that travel in 16 bits: half of the bytes.

#include <array>

#include "common/comm/communicator.h"

namespace lockstep {

/// What gradients are sent in: as they are, or rounded to bf16.
enum class Compression { none, bf16 };
constexpr auto words_of(Compression) { return std::array{"none", "bf16"}; }

/// The mean over the ranks, by messages of bf16. Mirrors PyTorch's bf16_compress_hook, which rounds
/// before it divides by W, and so once more where W is no power of two.
///
/// A rank's x / W is rounded; the sums of these are added in float32 and rounded once (shm), or by
/// each rank that passes them on (W - 1 times in a ring). To round moves a number by 2^-8 of it at
/// most. So the mean is off by no more than ((1 + 2^-8)^k - 1) times the mean of the ranks' |x|,
/// where k is 2 in shared memory, and W in a ring.
class Bf16Mean {
 public:
  /// `comm` must outlive this object; `stream` is that of all calls.
  Bf16Mean(Communicator& comm, Stream stream) : comm_(comm), stream_(stream) {}

  /// x [n] becomes the mean of all ranks' x, with the same bits on all ranks.
  void operator()(const Tensor& x);

 private:
  Communicator& comm_;
  Stream stream_;
  Bf16Tensor message_;  // as large as the largest x so far
};

}  // namespace lockstep
