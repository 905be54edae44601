#include "04-ddp/join.h"

#include <algorithm>

#include "common/core/error.h"
#include "common/core/listed.h"
#include "common/core/tensor.h"

namespace lockstep {

void require_even_inputs(int64_t batches, const ExchangeTexts& exchange) {
  const std::vector<std::string> all = exchange(std::to_string(batches));
  const bool even = std::all_of(all.begin(), all.end(), [&](const auto& n) { return n == all[0]; });
  require(even,
          "batches of this epoch by rank: {}; expected equally many, or the ranks would wait for "
          "each other; deal the samples out evenly, or use Join",
          listed(all));
}

int64_t Join::samples_of_step(int64_t mine) {
  const auto counts = BasicTensor<int64_t>::from_host(stream_, {2}, {mine, mine == 0 ? 1 : 0});
  ranks_.all_reduce(stream_, counts);
  const std::vector<int64_t> all = counts.to_host();
  const int64_t samples = all[0], without = all[1];
  require(early_end_ == EarlyEnd::take_part || samples == 0 || without == 0,
          "step {}: {} of {} ranks have run out of samples; deal the samples out evenly, or let "
          "those ranks take part without any",
          step_, without, ranks_.world_size());
  ++step_;
  return samples;
}

}  // namespace lockstep
