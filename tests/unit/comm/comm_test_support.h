#pragma once
// Groups of collectives that fail, and a world that still works.

#include <functional>
#include <string>
#include <vector>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"

namespace lockstep::testing::comm {

/// The error of a group in which rank r makes calls[r]; checks that it is one line.
using Calls = std::function<void(Communicator&, Stream)>;
template <class E>
std::string error_of_group(Ranks& ranks, const std::vector<Calls>& calls) {
  const std::string text = message_of<E>([&] {
    ranks.together([&](Communicator& rank, Stream stream) { calls[rank.rank()](rank, stream); });
  });
  CHECK(text.find('\n') == std::string::npos);
  return text;
}

/// A world that works: an all-reduce of ones counts its ranks.
inline bool counts_its_ranks(Ranks& ranks) {
  const auto ones = numbered<int64_t>(ranks, 3, 0);
  for (const BasicTensor<int64_t>& x : ones) x.copy_from_host({1, 1, 1});
  ranks.together(
      [&](Communicator& rank, Stream stream) { rank.all_reduce(stream, ones[rank.rank()]); });
  return std::all_of(ones.begin(), ones.end(), [&](const BasicTensor<int64_t>& x) {
    return x.to_host() == std::vector<int64_t>(3, ranks.size());
  });
}

}  // namespace lockstep::testing::comm
