#pragma once
// Messages of 16 bits: half of the bytes.

#include <array>
#include <string_view>

#include "common/comm/communicator.h"

namespace lockstep {

class OptionParser;

/// How numbers are sent: as they are, or rounded to bf16.
enum class Compression { none, bf16 };
constexpr auto words_of(Compression) { return std::array{"none", "bf16"}; }

/// Throws BadInput for what excludes `option`, which rounds `what`: a float64 build, --baseline.
void check_compression(std::string_view option, std::string_view what, const OptionParser& parser);

/// Collectives that send bf16. Their inputs and results are float32; results have the same bits on
/// all ranks.
///
/// A sum rounds each rank's numbers first. Shared memory adds them in float32 and rounds the sum
/// once. In a ring each rank that passes a sum on rounds it, W - 1 times. Rounding moves a number
/// by at most 2^-8 of it. So a sum is off by no more than ((1 + 2^-8)^k - 1) times the sum of the
/// ranks' |x|. Here k is 2 in shared memory, and W in a ring. A gather rounds once.
class Bf16Messages {
 public:
  /// `comm` must outlive this object; all calls go to `stream`.
  Bf16Messages(Communicator& comm, Stream stream) : comm_(comm), stream_(stream) {}

  /// Replaces x [n] by the sum of all ranks' factor * x, rounded after the product. With 1/W this
  /// mirrors PyTorch's bf16_compress_hook. The hook rounds before it divides by W, and so rounds
  /// once more where W is no power of two.
  void all_reduce(Real factor, const Tensor& x) const;
  /// Writes this rank's part of the sum of all ranks' x to `mine` [n / W], which may lie in x.
  void reduce_scatter(const Tensor& x, const Tensor& mine) const;
  /// Fills x [n] with all ranks' `mine` [n / W], which may lie in x.
  void all_gather(const Tensor& mine, const Tensor& x) const;

 private:
  Bf16Tensor rounded(Real factor, const Tensor& x) const;
  Bf16Tensor part_of_this_rank(const Bf16Tensor& message) const;

  Communicator& comm_;
  Stream stream_;
};

}  // namespace lockstep
