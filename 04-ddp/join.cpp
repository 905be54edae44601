#include "04-ddp/join.h"

#include <algorithm>

#include "common/core/error.h"
#include "common/core/tensor.h"

namespace lockstep {

void require_even_inputs(int64_t batches, const ExchangeTexts& exchange) {
  const std::vector<std::string> all = exchange(std::to_string(batches));
  const bool even = std::all_of(all.begin(), all.end(), [&](const auto& n) { return n == all[0]; });
  require(even,
          "batches of this epoch by rank: {}; expected equally many, or the ranks would wait for "
          "each other; deal the samples out evenly, or use Join",
          fmt::join(all, ", "));
}

int64_t Join::samples_of_step(int64_t mine) {
  const auto samples = BasicTensor<int64_t>::from_host(stream_, {1}, {mine});
  ranks_.all_reduce(stream_, samples);
  return samples.to_host()[0];
}

}  // namespace lockstep
