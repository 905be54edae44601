// Collectives between processes: Gloo, with all ranks of a group in this process.

#include "common/comm/process/gloo_transport.h"

#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/local_store.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using testing::check_dependent_calls;
using testing::gloo_ranks;
using testing::Ranks;
using testing::Trial;

template <class T>
void check_everything(Ranks& ranks, const std::vector<int64_t>& counts, double tolerance) {
  for (const int64_t n : counts) {
    INFO(ranks.size() << " ranks, shares of " << n << " elements of " << sizeof(T) << " bytes");
    Trial<T> trial(ranks, n);
    trial.enqueue_all(/*every_root=*/n == 1);
    CHECK(trial.first_fault(tolerance) == "");
  }
}

TEST_CASE("With Gloo every collective is what a serial program computes", "[comm][gloo][row70]") {
  for (int64_t world_size = 1; world_size <= 5; ++world_size) {
    Ranks ranks = gloo_ranks(static_cast<int>(world_size));
    const std::vector<int64_t> counts{0, 1, 2, world_size - 1, world_size, world_size + 1, 1000};
    check_everything<float>(ranks, counts, 1e-6);  // rings add in another order
    check_everything<double>(ranks, counts, 1e-15);
    check_everything<int64_t>(ranks, counts, 0);
  }
  Ranks ranks = gloo_ranks(3);
  check_everything<float>(ranks, {1000001}, 1e-6);
}

TEST_CASE("With Gloo the dependent calls of one group take effect in their order", "[comm][gloo]") {
  check_dependent_calls(gloo_ranks(2));
}

/// The error of rank 0, which alone makes this call.
std::string error_of_first_rank(Ranks& ranks) {
  const auto x = testing::numbered<int64_t>(ranks, 3, 1);
  ranks.processes[0]->all_reduce(ranks.streams[0], x[0]);
  const std::string text = testing::message_of<PeerLost>([&] { ranks.streams[0].synchronize(); });
  CHECK_THAT(
      text, Catch::Matchers::StartsWith("rank 0: collective 1 (all_reduce of 3 i64, sum): Gloo: "));
  return text;
}

TEST_CASE("With Gloo a rank that does not come is missed in time", "[comm][gloo][row72]") {
  Ranks ranks = gloo_ranks(2, 0.5);
  const auto begin = testing::Clock::now();
  CHECK_THAT(error_of_first_rank(ranks), Catch::Matchers::ContainsSubstring("Timed out"));
  CHECK(testing::seconds_since(begin) >= 0.4);
  CHECK(testing::seconds_since(begin) < 10);
}

TEST_CASE("With Gloo a rank that has gone is noticed at once", "[comm][gloo][row67]") {
  Ranks ranks = gloo_ranks(2, 60);
  ranks.processes[1].reset();
  const auto begin = testing::Clock::now();
  CHECK_THAT(error_of_first_rank(ranks), Catch::Matchers::ContainsSubstring("closed"));
  CHECK(testing::seconds_since(begin) < 10);
}

}  // namespace
}  // namespace lockstep
