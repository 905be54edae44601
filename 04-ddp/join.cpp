#include "04-ddp/join.h"

#include "common/core/error.h"
#include "common/core/tensor.h"

namespace lockstep {

void require_even_inputs(int64_t batches, const ExchangeTexts& exchange) {
  require_same(exchange, {{"batches of this epoch", std::to_string(batches)}},
               "the one would wait for the other; deal the samples out evenly, or use Join");
}

int64_t Join::samples_of_step(int64_t mine) {
  const auto counts = BasicTensor<int64_t>::from_host(stream_, {2}, {mine, mine == 0 ? 1 : 0});
  comm_.all_reduce(stream_, counts);
  const std::vector<int64_t> all = counts.to_host();
  const int64_t samples = all[0], without = all[1];
  require(early_end_ == EarlyEnd::take_part || samples == 0 || without == 0,
          "step {}: {} of {} ranks have run out of samples; deal the samples out evenly, or let "
          "those ranks take part without any",
          step_, without, comm_.world_size());
  ++step_;
  return samples;
}

}  // namespace lockstep
