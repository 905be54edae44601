// Hidden cases of stage 06.

#include "tests/coursework/hidden/hidden.h"
#include "tests/coursework/stage06_test.cpp"  // NOLINT(bugprone-suspicious-include): its helpers

namespace lockstep {
namespace {

using testing::Hidden;

TEST_CASE("Other lengths and ranks", "[hidden06.1]") {
  Hidden hidden("06.1");
  for (int time = 0; time < 10; ++time) {
    const int64_t elements = hidden.whole(0, 400);
    const int ranks = hidden.whole(1, 9);
    hidden.tell(fmt::format("{} numbers, padded for {} ranks", elements, ranks),
                padded_length(elements, ranks));
    const int64_t length = ranks * hidden.whole(1, 50);
    const int rank = hidden.whole(0, ranks - 1);
    hidden.tell(fmt::format("rank {} of {}, {} numbers", rank, ranks, length),
                told(shard_of(length, rank, ranks)));
  }
}

TEST_CASE("Pieces in other shards", "[hidden06.1]") {
  Hidden hidden("06.1 pieces");
  for (int time = 0; time < 8; ++time) {
    std::vector<FlatRange> parameters;
    int64_t end = 0;
    for (int64_t i = hidden.whole(1, 6); i > 0; --i) {
      parameters.push_back({end + hidden.whole(0, 3), hidden.whole(0, 20)});
      end = parameters.back().end();
    }
    const FlatRange shard{hidden.whole(0, end), hidden.whole(0, 40)};
    hidden.tell(fmt::format("{} parameters, a shard of {}", parameters.size(), told(shard)),
                told(pieces_in(parameters, shard)));
  }
}

TEST_CASE("Steps with other gradients", "[hidden06.2]") {
  Hidden hidden("06.2");
  TwoRanks two({.momentum = hidden.share()});
  for (int step = 0; step < 3; ++step) {
    const Values first = hidden.reals(4);
    two.step({first, hidden.reals(4)});
    for (const size_t rank : {0u, 1u}) hidden.tell("values after a step", two.values(rank));
  }
}

TEST_CASE("Units are gathered and freed in other orders", "[hidden06.3]") {
  Hidden hidden("06.3");
  for (int time = 0; time < 3; ++time) {
    OneUnit rank(hidden.one_of<ShardKind>({ShardKind::parameters, ShardKind::gradients}));
    const int64_t before = rank.device.device->memory().current();
    const int64_t own = rank.unit.value_shard().elements();
    rank.unit.value_shard().copy_from_host(hidden.reals(own));
    rank.unit.shard_was_updated();
    for (int64_t calls = hidden.whole(1, 3); calls > 0; --calls) rank.unit.gather();
    rank.unit.await_values();
    rank.communication.synchronize();
    const auto ends = rank.ends();
    hidden.tell("ends of a gathered unit", Values{ends[0], ends[1]});
    rank.unit.free_values();
    rank.device.stream.synchronize();
    hidden.tell("memory more than before", rank.device.device->memory().current() - before);
    for (int64_t calls = hidden.whole(0, 2); calls > 0; --calls) rank.unit.gather();
    rank.unit.await_values();
    rank.communication.synchronize();
    hidden.tell("gathers", int64_t(rank.other.gathers.size()));
  }
}

TEST_CASE("Other squares", "[hidden06.4]") {
  Hidden hidden("06.4");
  for (const ShardKind kind :
       {ShardKind::none, ShardKind::optimizer, ShardKind::gradients, ShardKind::parameters}) {
    Norm rank(kind, hidden.share());
    rank.squares.copy_from_host({hidden.share()});
    rank.sharded.sum_over_shards(rank.squares);
    rank.communication.synchronize();
    hidden.tell(fmt::format("kind {}", int(kind)), rank.squares.to_host());
  }
}

TEST_CASE("Other shards, joined", "[hidden06.5]") {
  Hidden hidden("06.5");
  for (int time = 0; time < 10; ++time) {
    std::vector<FlatRange> saved;
    int64_t end = 0;
    for (int64_t i = hidden.whole(1, 6); i > 0; --i) {
      saved.push_back({end, hidden.whole(0, 9)});
      end = saved.back().end();
    }
    std::ranges::reverse(saved);
    std::swap(saved.front(), saved[hidden.whole<size_t>(0, saved.size() - 1)]);
    const int64_t first = hidden.whole(0, end);
    const FlatRange wanted{first, hidden.whole(0, end - first)};
    hidden.tell(fmt::format("{} saved shards, wanted {}", saved.size(), told(wanted)),
                joined(saved, wanted));
    const FlatRange too_much{first, end - first + hidden.whole(1, 5)};
    hidden.tell("more than was saved is refused",
                refused(saved, too_much) == "accepted" ? "no" : "yes");
  }
}

}  // namespace
}  // namespace lockstep
