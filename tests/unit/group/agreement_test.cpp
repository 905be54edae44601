// What ranks agree on: the same values on all, and how the work of rank 0 ended. Ranks are threads.

#include "common/group/agreement.h"

#include <new>
#include <string>
#include <vector>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/local_store.h"
#include "tests/support/rank_threads.h"

namespace lockstep {
namespace {

using Texts = std::vector<std::string>;

/// What each of the ranks threw in body(rank, exchange).
template <class Body>
Texts errors_of_ranks(int world_size, Body body) {
  testing::LocalStore store;
  return testing::run_ranks(world_size, [&](int rank) {
    body(rank,
         [&, rank](const std::string& mine) { return store.exchange(rank, world_size, mine); });
  });
}

Texts errors_of_facts(const std::vector<NamedValues>& of_ranks) {
  return errors_of_ranks(static_cast<int>(of_ranks.size()), [&](int rank, const auto& exchange) {
    require_same(exchange, of_ranks[static_cast<size_t>(rank)], "give all the same");
  });
}

TEST_CASE("NamedValues that are the same on all ranks pass, others are named on all", "[group]") {
  const NamedValues usual{{"lr", "0.1"}, {"odd; \n\t", ""}, {"pad", "false"}};
  CHECK(errors_of_facts({usual}) == Texts(1));
  CHECK(errors_of_facts({usual, usual, usual}) == Texts(3));
  CHECK(errors_of_facts({{}, {}}) == Texts(2));

  NamedValues other = usual;
  other[0].second = "0.2";
  other[2].second = "true";
  CHECK(errors_of_facts({usual, usual, other}) ==
        Texts(3, "lr: rank 0 has 0.1, rank 2 has 0.2; give all the same"));
  CHECK(errors_of_facts({other, usual}) ==
        Texts(2, "lr: rank 0 has 0.2, rank 1 has 0.1; give all the same"));
}

TEST_CASE("A fact that one rank does not have counts as nothing", "[group]") {
  const NamedValues one{{"parameter 0", "w [2]"}},
      two{{"parameter 0", "w [2]"}, {"parameter 1", "b [2]"}};
  CHECK(errors_of_facts({one, two}) ==
        Texts(2, "parameter 1: rank 0 has nothing, rank 1 has b [2]; give all the same"));
  CHECK(errors_of_facts({two, one}) ==
        Texts(2, "parameter 1: rank 0 has b [2], rank 1 has nothing; give all the same"));
  // In another order they are the same.
  CHECK(errors_of_facts({two, {two[1], two[0]}}) == Texts(2));
}

TEST_CASE("What rank 0 returns comes to all ranks, whatever bytes it has", "[group]") {
  const std::string bytes("a\0\xff\n", 4);
  Texts results(3);
  const Texts errors = errors_of_ranks(3, [&](int rank, const auto& exchange) {
    results[static_cast<size_t>(rank)] = on_rank_0(rank, exchange, [&] {
      require(rank == 0, "this rank has nothing to do");
      return bytes;
    });
  });
  CHECK(errors == Texts(3));
  CHECK(results == Texts(3, bytes));
}

/// The kinds of the errors that all ranks throw where rank 0's work throws `error`.
template <class Thrown>
bool all_throw(const Thrown& error) {
  const auto has_kind = [](const auto& work) {
    try {
      work();
    } catch (const Thrown&) {
      return true;
    } catch (...) {
    }
    return false;
  };
  std::vector<char> same(3, false);
  errors_of_ranks(3, [&](int rank, const auto& exchange) {
    same[static_cast<size_t>(rank)] =
        has_kind([&] { on_rank_0(rank, exchange, [&]() -> std::string { throw error; }); });
  });
  return same == std::vector<char>(3, true);
}

TEST_CASE("What rank 0 throws is thrown on all ranks, of the same kind", "[group]") {
  CHECK(all_throw(BadInput("x")));
  CHECK(all_throw(NonFinite("x")));
  CHECK(all_throw(OpenTask("x")));
  CHECK(all_throw(DeviceError("x")));
  CHECK(all_throw(PeerLost("x")));
  CHECK(all_throw(EnvironmentError("x")));

  const Texts errors = errors_of_ranks(2, [](int rank, const auto& exchange) {
    try {
      on_rank_0(rank, exchange, []() -> std::string { throw std::bad_alloc(); });
    } catch (const EnvironmentError& error) {
      fail<BadInput>("environment: {}", error.what());
    }
  });
  CHECK(errors == Texts(2, "environment: std::bad_alloc"));
}

TEST_CASE("An error that quotes a whole file fits through the store, and is cut alike on all ranks",
          "[group]") {
  const std::string longest = "file: " + std::string(3 << 20, 'x');
  const auto work = [&]() -> std::string { throw BadInput(longest); };
  CHECK(RankOutcome::of(work).as_text().size() < 20000);
  const Texts errors =
      errors_of_ranks(2, [&](int rank, const auto& exchange) { on_rank_0(rank, exchange, work); });
  CHECK(errors == Texts(2, longest.substr(0, 16384) + "..."));
  try {
    std::rethrow_exception(RankOutcome::of(work).thrown());
  } catch (const BadInput& error) {
    CHECK(error.what() == errors[0]);
  }
}

TEST_CASE("An outcome says the status of a program that ends with it", "[group]") {
  const auto status = [](const auto& error) {
    return RankOutcome::of([&]() -> std::string { throw error; }).exit_status();
  };
  CHECK(RankOutcome::of([] { return "done"; }).exit_status() == 0);
  CHECK(status(BadInput("x")) == 1);
  CHECK(status(PeerLost("x")) == PeerLost("x").exit_status());
  CHECK(status(DeviceError("x")) == DeviceError("x").exit_status());
  CHECK(status(std::bad_alloc()) == 1);
}

}  // namespace
}  // namespace lockstep
