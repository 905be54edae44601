#include "04-ddp/compression.h"

#include "common/core/error.h"
#include "common/kernels/kernels.h"
#include "common/options/option_parser.h"

namespace lockstep {

void check_compression(std::string_view option, std::string_view what, const OptionParser& parser) {
  require(sizeof(Real) == 4,
          "{}: rounds float32, and this build computes in float64, for proofs; take one with "
          "-Dprecision=float",
          option);
  require(!parser.given("--baseline"),
          "{}: rounds {}, so the weights are not those of one device; leave out --baseline", option,
          what);
}

Bf16Tensor Bf16Messages::rounded(Real factor, const Tensor& x) const {
  const Bf16Tensor message = Bf16Tensor::empty(stream_, x.shape());
  stream_.kernels().to_sixteen_bits(stream_, factor, x, message);
  return message;
}

Bf16Tensor Bf16Messages::part_of_this_rank(const Bf16Tensor& message) const {
  const int64_t count = message.elements() / comm_.world_size();
  return message.range(comm_.rank() * count, {count});
}

void Bf16Messages::all_reduce(Real factor, const Tensor& x) const {
  const Bf16Tensor message = rounded(factor, x);
  comm_.all_reduce(stream_, message);
  stream_.kernels().from_sixteen_bits(stream_, message, x);
}

void Bf16Messages::reduce_scatter(const Tensor& x, const Tensor& mine) const {
  const Bf16Tensor message = rounded(1, x);
  const Bf16Tensor sum = part_of_this_rank(message);
  comm_.reduce_scatter(stream_, message, sum);
  stream_.kernels().from_sixteen_bits(stream_, sum, mine);
}

void Bf16Messages::all_gather(const Tensor& mine, const Tensor& x) const {
  const Bf16Tensor message = Bf16Tensor::empty(stream_, x.shape());
  const Bf16Tensor part = part_of_this_rank(message);
  stream_.kernels().to_sixteen_bits(stream_, 1, mine, part);
  comm_.all_gather(stream_, part, message);
  stream_.kernels().from_sixteen_bits(stream_, message, x);
}

}  // namespace lockstep
