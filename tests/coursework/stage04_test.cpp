// Grades stage 04.

#include <deque>

#include "04-ddp/all_reduce.h"
#include "04-ddp/buckets.h"
#include "tests/coursework/hint.h"
#include "tests/support/tcp_stores.h"

namespace lockstep {
namespace {

using testing::Ranks;
using Values = std::vector<Real>;

constexpr double kPatience = 3;  // seconds until a rank gives up waiting for another

/// What all ranks have after the ring, in which rank r's number i was 10^r (i + 1), and the bytes
/// that each of them sent.
struct RingResult {
  RingResult(int world_size, int64_t count) : ranks(testing::ring_ranks(world_size, kPatience)) {
    std::vector<Tensor> x;
    std::deque<AllReduce> reduce;
    Real factor = 1;
    expected.assign(static_cast<size_t>(count), 0);
    for (size_t rank = 0; rank < ranks.streams.size(); ++rank, factor *= 10) {
      Values values;
      for (int64_t i = 0; i < count; ++i) values.push_back(factor * Real(i + 1));
      for (size_t i = 0; i < values.size(); ++i) expected[i] += values[i];
      x.push_back(Tensor::from_host(ranks.streams[rank], {count}, values));
      reduce.emplace_back(*ranks.processes[rank], AllReduceKind::ring, ranks.streams[rank]);
      reduce.back()(x.back());
    }
    for (const Tensor& sum : x) found.push_back(sum.to_host());
    for (const AllReduce& rank : reduce) bytes_sent.push_back(rank.bytes_sent());
  }
  Ranks ranks;
  Values expected;
  std::vector<Values> found;
  std::vector<int64_t> bytes_sent;
};

TEST_CASE("Two ranks have the sum of both", "[task04.1]") {
  HINT(
      "one rank waits for another that sends nothing: do all ranks make the same number of steps, "
      "and send and receive in one group?");
  const RingResult ring(2, 2);
  {
    HINT("a digit is the number of times that a rank's value was added: once each");
    CHECK(ring.found[0] == ring.expected);
  }
  HINT("rank 0 has the sum, rank 1 has not: which part does each begin with?");
  CHECK(ring.found[1] == ring.expected);
}

TEST_CASE("Four ranks with parts of different lengths", "[task04.1]") {
  HINT("ranks do not agree on the length of what they exchange: which part goes when?");
  const RingResult ring(4, 7);
  for (const Values& found : ring.found) {
    HINT(
        "some part is not complete on some rank: of which part does a rank hold the sum after the "
        "reduce-scatter, and is that the one it passes on first?");
    CHECK(found == ring.expected);
  }
}

TEST_CASE("A rank sends 2 (W-1)/W of the numbers", "[task04.1]") {
  HINT("a rank sends one part in each step: does it send more, or make more steps than needed?");
  const RingResult ring(3, 6);
  const int64_t expected = 2 * 2 * 2 * int64_t{sizeof(Real)};
  for (const int64_t sent : ring.bytes_sent) CHECK(sent == expected);
}

// --- Buckets -------------------------------------------------------------------------------------

using Sizes = std::vector<int64_t>;

Sizes bytes_of(const std::vector<Bucket>& buckets) {
  Sizes bytes;
  for (const Bucket& bucket : buckets) bytes.push_back(bucket.bytes);
  return bytes;
}

TEST_CASE("A bucket is closed when it has reached its cap", "[task04.2]") {
  HINT(
      "a bucket takes gradients until it has reached its cap: the one that reaches it is still in");
  CHECK(bytes_of(plan_buckets({4, 4, 4}, {.first_bytes = 6, .bytes = 6})) == Sizes{8, 4});
  HINT("a gradient larger than the cap does not break a bucket up");
  CHECK(bytes_of(plan_buckets({2, 100, 2}, {.first_bytes = 6, .bytes = 6})) == Sizes{102, 2});
}

TEST_CASE("The first bucket has a cap of its own", "[task04.2]") {
  HINT("only the first bucket is small, so that the first all-reduce starts early");
  CHECK(bytes_of(plan_buckets({4, 4, 4, 4, 4}, {.first_bytes = 4, .bytes = 8})) == Sizes{4, 8, 8});
}

TEST_CASE("Gradients are in the order in which backward completes them", "[task04.2]") {
  const std::vector<Bucket> buckets = plan_buckets({4, 4, 4, 4}, {.first_bytes = 8, .bytes = 8});
  HINT("every gradient is in one bucket");
  REQUIRE(bytes_of(buckets) == Sizes{8, 8});
  HINT("backward completes gradient 0 first: the first bucket must not wait for later ones");
  CHECK(buckets[0].parameters == std::vector<size_t>{0, 1});
  CHECK(buckets[1].parameters == std::vector<size_t>{2, 3});
}

TEST_CASE("No gradients, no buckets; a cap of 0, a bucket each", "[task04.2]") {
  HINT("a bucket is opened for a gradient, never beforehand");
  CHECK(plan_buckets({}, {}).empty());
  HINT("with a cap of 0 every bucket is full as soon as it has one gradient");
  CHECK(bytes_of(plan_buckets({8, 0, 16}, BucketCaps::equal(0))) == Sizes{8, 0, 16});
}

}  // namespace
}  // namespace lockstep
