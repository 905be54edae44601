#include "04-ddp/compression.h"

#include "common/kernels/kernels.h"

namespace lockstep {

void Bf16Mean::operator()(const Tensor& x) {
  if (!message_.defined() || message_.elements() < x.elements()) {
    message_ = Bf16Tensor::empty(stream_, x.shape());
  }
  const Bf16Tensor message = message_.range(0, {x.elements()});
  const CallPurpose purpose(comm_, Purpose::gradients);
  stream_.kernels().to_bf16(stream_, Real(1) / Real(comm_.world_size()), x, message);
  comm_.all_reduce(stream_, message);
  stream_.kernels().from_bf16(stream_, message, x);
}

}  // namespace lockstep
