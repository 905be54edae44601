#pragma once
// Messages of 16 bits: half of the bytes.

#include <array>
#include <string_view>

#include "common/comm/communicator.h"

namespace lockstep {

class OptionParser;

/// What numbers are sent in: as they are, or rounded to bf16.
enum class Compression { none, bf16 };
constexpr auto words_of(Compression) { return std::array{"none", "bf16"}; }

/// Refuses what "--compress bf16" or another option that rounds `what` cannot be together with.
void check_compression(std::string_view option, std::string_view what, const OptionParser& parser);

/// Collectives whose messages are of bf16. What goes in and comes out is float32, with the same
/// bits on all ranks.
///
/// In a sum each rank's numbers are rounded; the sums of these are added in float32 and rounded
/// once (shm), or by each rank that passes them on (W - 1 times in a ring). To round moves a number
/// by 2^-8 of it at most. So a sum is off by no more than ((1 + 2^-8)^k - 1) times the sum of the
/// ranks' |x|, where k is 2 in shared memory, and W in a ring. What is gathered is rounded once.
class Bf16Messages {
 public:
  /// `comm` must outlive this object; `stream` is that of all calls.
  Bf16Messages(Communicator& comm, Stream stream) : comm_(comm), stream_(stream) {}

  /// x [n] becomes the sum of all ranks' factor * x, which is rounded after the product. With 1/W
  /// it mirrors PyTorch's bf16_compress_hook, which rounds before it divides by W, and so once more
  /// where W is no power of two.
  void all_reduce(Real factor, const Tensor& x) const;
  /// `mine` [n / W] becomes this rank's part of the sum of all ranks' x. It may lie in x.
  void reduce_scatter(const Tensor& x, const Tensor& mine) const;
  /// x [n] becomes all ranks' `mine` [n / W]. It may lie in x.
  void all_gather(const Tensor& mine, const Tensor& x) const;

 private:
  Bf16Tensor rounded(Real factor, const Tensor& x) const;
  Bf16Tensor part_of_this_rank(const Bf16Tensor& message) const;

  Communicator& comm_;
  Stream stream_;
};

}  // namespace lockstep
