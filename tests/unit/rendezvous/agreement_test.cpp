// How ranks agree: they meet in the store, do work that fails on all if it fails on one, and
// compare values. Ranks are threads.

#include "common/rendezvous/agreement.h"

#include <new>
#include <optional>
#include <string>
#include <vector>

#include "common/core/error.h"
#include "common/rendezvous/store_server.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/local_store.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tasks.h"
#include "tests/support/tcp_stores.h"

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

TEST_CASE("What each rank returns comes to all ranks, whatever bytes it has", "[group]") {
  const std::string bytes("a\0\xff\n", 4);
  std::vector<Texts> results(3);
  const Texts errors = errors_of_ranks(3, [&](int rank, const auto& exchange) {
    results[static_cast<size_t>(rank)] =
        together(exchange, [&] { return bytes + std::to_string(rank); });
  });
  CHECK(errors == Texts(3));
  CHECK(results == std::vector<Texts>(3, {bytes + "0", bytes + "1", bytes + "2"}));
}

/// Whether all ranks throw what the work of ranks 1 and 2 throws, as rank 1 words it.
template <class Thrown>
bool all_throw() {
  const auto throws = [](const auto& work) {
    try {
      work();
    } catch (const Thrown& error) {
      return error.what() == std::string("from 1");
    } catch (...) {
    }
    return false;
  };
  std::vector<char> same(3, false);
  errors_of_ranks(3, [&](int rank, const auto& exchange) {
    same[static_cast<size_t>(rank)] = throws([&] {
      together(exchange, [&]() -> std::string {
        if (rank > 0) throw Thrown("from " + std::to_string(rank));
        return "";
      });
    });
  });
  return same == std::vector<char>(3, true);
}

TEST_CASE("What a rank throws is thrown on all, of the same kind", "[group]") {
  CHECK(all_throw<BadInput>());
  CHECK(all_throw<NonFinite>());
  CHECK(all_throw<OpenTask>());
  CHECK(all_throw<DeviceError>());
  CHECK(all_throw<PeerLost>());
  CHECK(all_throw<EnvironmentError>());

  const Texts errors = errors_of_ranks(2, [](int, const auto& exchange) {
    try {
      together(exchange, []() -> std::string { throw std::bad_alloc(); });
    } catch (const EnvironmentError& error) {
      fail<BadInput>("environment: {}", error.what());
    }
  });
  CHECK(errors == Texts(2, "environment: std::bad_alloc"));
}

TEST_CASE("An error that quotes a whole file fits through the store, and is cut alike on all ranks",
          "[group]") {
  const std::string longest = "file: " + std::string(3 << 20, 'x');
  std::vector<std::string> sent;
  const auto alone = [&](const std::string& mine) { return sent = {mine}; };
  const Outcomes all = outcomes(alone, [&]() -> std::string { throw BadInput(longest); });
  CHECK(sent[0].size() < 20000);
  REQUIRE(all.failed == 0);
  for (const std::exception_ptr& each : {all.error, all.thrown}) {
    try {
      std::rethrow_exception(each);
    } catch (const BadInput& error) {
      CHECK(error.what() == longest.substr(0, 16384) + "...");
    }
  }
}

// --- The store -----------------------------------------------------------------------------------

TEST_CASE("Ranks meet: each gets all texts, however large, by one question", "[group][tsan]") {
  constexpr int kRanks = 4;
  const testing::Stores stores(kRanks);
  const auto text = [](int rank, int turn) {
    return std::string(size_t(turn == 1 ? 900'000 : 9), char('a' + rank));
  };
  const Texts errors = testing::run_ranks(kRanks, [&](int rank) {
    for (int turn = 0; turn < 3; ++turn) {
      const Texts all =
          exchange(stores[rank], "turn " + std::to_string(turn), text(rank, turn), testing::kLong);
      for (int other = 0; other < kRanks; ++other) {
        if (all.at(size_t(other)) != text(other, turn)) {
          fail<BadInput>("the text of rank {}", other);
        }
      }
    }
  });
  CHECK(errors == Texts(kRanks));
}

TEST_CASE("A meeting ends when one of those who are awaited has gone, and others do not matter",
          "[group][tsan]") {
  testing::Stores stores(4);
  stores.all[3].reset();  // in good order
  const auto begin = testing::Clock::now();
  const Meeting waits = stores[0].meet("here", "0", {0, 3}, testing::kLong);
  CHECK(testing::seconds_since(begin) < testing::kSoon);
  CHECK(waits.texts == std::vector<std::optional<std::string>>{"0", {}, {}, {}});
  CHECK(waits.gone == std::vector<int>{3});
  CHECK(stores[1].meet("here", "1", {0, 1}, testing::kLong).texts[0] == "0");
  CHECK_FALSE(look(stores[2], "elsewhere").texts[0].has_value());
  CHECK(stores[2].meet("here", {}, {2}, testing::kShort).texts[1] == "1");
  CHECK(who_went_first(stores[2]) == "rank 3 closed the connection");
}

TEST_CASE("Rank 0 takes its leave last: when others have, or are missed, or time is up",
          "[group][tsan]") {
  const testing::Stores stores(4);
  const auto seconds = [&](int rank, double most, const std::vector<int>& missing = {}) {
    const auto begin = testing::Clock::now();
    take_leave(stores[rank], "end", "", most, missing);
    return testing::seconds_since(begin);
  };
  CHECK(seconds(2, testing::kLong) < testing::kSoon);
  CHECK(seconds(0, testing::kShort, {3}) >= testing::kShort);  // for rank 1
  CHECK(seconds(1, testing::kLong) < testing::kSoon);
  CHECK(seconds(0, testing::kLong, {3}) < testing::kSoon);
}

TEST_CASE("Rank 0, whose process takes the store along, gets its answer last", "[group]") {
  StoreState state(3, "");
  for (const int rank : {0, 1, 2}) state.join({.world_size = 3, .rank = rank});
  for (const int rank : {0, 2, 1}) {
    CHECK(state.take_answers().empty());
    state.handle(rank, {.op = Request::Op::meet,
                        .key = "here",
                        .value = "x",
                        .awaited = {0, 1, 2},
                        .seconds = testing::kLong});
  }
  std::vector<int> answered;
  for (const auto& [rank, reply] : state.take_answers()) answered.push_back(rank);
  CHECK(answered == std::vector<int>{2, 1, 0});
}

}  // namespace
}  // namespace lockstep
