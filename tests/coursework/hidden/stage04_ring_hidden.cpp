// Hidden cases of stage 04: the ring.

#include "tests/coursework/hidden/hidden.h"
#include "tests/coursework/stage04_ring_test.cpp"  // NOLINT(bugprone-suspicious-include): its helpers

namespace lockstep {
namespace {

using testing::Hidden;

/// All ranks' numbers after the ring, and what each of them sent.
void tell_ring(Hidden& hidden, int world_size, int64_t count) {
  const Ranks ranks = testing::tcp_ranks(world_size, kPatience);
  std::vector<Tensor> x;
  std::deque<Neighbour> neighbours;
  std::deque<AllReduce> reduce;
  for (size_t rank = 0; rank < ranks.streams.size(); ++rank) {
    x.push_back(Tensor::from_host(ranks.streams[rank], {count}, hidden.reals(count)));
    neighbours.emplace_back(*ranks.comms[rank]);
    reduce.emplace_back(neighbours.back(), AllReduceKind::ring, ranks.streams[rank]);
    reduce.back()(x.back());
  }
  const std::string which = fmt::format("{} ranks, {} numbers: ", world_size, count);
  for (const Tensor& sum : x) hidden.tell(which + "the sum", sum.to_host());
  for (const auto& comm : ranks.comms) hidden.tell(which + "bytes sent", comm->bytes_sent());
  for (const Neighbour& rank : neighbours) hidden.tell(which + "messages", rank.messages);
}

TEST_CASE("Two ranks with other numbers", "[hidden04.1]") {
  Hidden hidden("04.1 two");
  for (int time = 0; time < 3; ++time) tell_ring(hidden, 2, 2 * hidden.whole(1, 20));
}

TEST_CASE("Other rings", "[hidden04.1]") {
  Hidden hidden("04.1");
  for (int time = 0; time < 3; ++time) tell_ring(hidden, hidden.whole(2, 5), hidden.whole(1, 40));
}

}  // namespace
}  // namespace lockstep
