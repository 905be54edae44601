// Grades stage 06.

#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "06-fully-sharded/shards.h"
#include "common/core/error.h"
#include "tests/coursework/hint.h"
#include "tests/coursework/sharded_ranks.h"

namespace lockstep {
namespace {

using testing::kLine;
using testing::Norm;
using testing::OneUnit;
using testing::TwoRanks;
using testing::Values;

// --- Shards --------------------------------------------------------------------------------------

TEST_CASE("Shards are equally long, and the padding makes them so", "[task06.1]") {
  {
    HINT("numbers that divide well need no padding: how many numbers are 64 bytes?");
    CHECK(padded_length(4 * kLine, 2) == 4 * kLine);
    CHECK(padded_length(0, 3) == 0);
  }
  {
    HINT("a number is left over: all ranks' shards have to become longer, by the same");
    CHECK(padded_length(4 * kLine + 1, 2) > 4 * kLine);
  }
  {
    HINT("each shard begins at a multiple of 64 bytes: what is rounded up, the whole or a shard?");
    CHECK(padded_length(4 * kLine + 1, 2) == 6 * kLine);
    CHECK(padded_length(10, 3) == 3 * kLine);
    CHECK(padded_length(18 * kLine, 17) == 17 * 2 * kLine);
  }
  HINT("one rank has everything, and pads for the 64 bytes only");
  CHECK(padded_length(kLine + 1, 1) == 2 * kLine);
}

/// "32 from 64": elements [64, 96).
std::string told(FlatRange range) { return fmt::format("{} from {}", range.count, range.first); }

TEST_CASE("A rank's shard follows that of the rank before", "[task06.1]") {
  HINT("all shards together are the whole buffer, once: where does each begin, how long is it?");
  CHECK(told(shard_of(96, 0, 3)) == "32 from 0");
  CHECK(told(shard_of(96, 1, 3)) == "32 from 32");
  CHECK(told(shard_of(96, 2, 3)) == "32 from 64");
}

/// "2 from 5 of parameter 0 at 7": its elements [5, 7) begin at number 7 of the shard.
std::string told(const std::vector<Piece>& pieces) {
  std::vector<std::string> texts;
  for (const Piece& piece : pieces) {
    texts.push_back(fmt::format("{} of parameter {} at {}", told(piece.of_parameter),
                                piece.parameter, piece.in_shard));
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

TEST_CASE("Pieces of the parameters that lie in a shard", "[task06.1]") {
  // Three parameters; padding after the first two.
  const std::vector<FlatRange> parameters{{0, 10}, {16, 40}, {64, 5}};
  {
    HINT("a parameter that lies in the shard as a whole is one piece");
    CHECK(told(pieces_in(parameters, {0, 12})) == "10 from 0 of parameter 0 at 0");
  }
  const std::vector<Piece> last = pieces_in(parameters, {60, 24});
  {
    HINT(
        "a parameter that has no element in the shard is no piece, and one behind it may have "
        "some");
    REQUIRE(last.size() == 1);
  }
  {
    HINT("parameters are numbered as they stand in the list of all");
    CHECK(last[0].parameter == 2);
  }
  {
    HINT("a parameter's elements are counted from its own first one");
    CHECK(told(last[0].of_parameter) == "5 from 0");
  }
  {
    HINT("where a piece begins is counted from the beginning of the shard, not of the buffer");
    CHECK(last[0].in_shard == 4);
  }
  {
    HINT("a parameter may end on the next rank: how much of it is here?");
    CHECK(told(pieces_in(parameters, {0, 48})) ==
          "10 from 0 of parameter 0 at 0, 32 from 0 of parameter 1 at 16");
  }
  {
    HINT("and it may have begun on the rank before: which of its elements are here?");
    CHECK(told(pieces_in(parameters, {48, 48})) ==
          "8 from 32 of parameter 1 at 0, 5 from 0 of parameter 2 at 16");
  }
  HINT("a parameter may begin before the shard and end behind it");
  CHECK(told(pieces_in(parameters, {20, 4})) == "4 from 4 of parameter 1 at 0");
}

TEST_CASE("What does not touch the shard has no piece", "[task06.1]") {
  const std::vector<FlatRange> parameters{{0, 16}, {16, 0}, {16, 20}};
  HINT("a piece without elements: a parameter that ends where the shard begins is not in it");
  CHECK(told(pieces_in(parameters, {16, 16})) == "16 from 0 of parameter 2 at 0");
  CHECK(told(pieces_in(parameters, {0, 16})) == "16 from 0 of parameter 0 at 0");
  HINT("padding belongs to no parameter");
  CHECK(told(pieces_in(parameters, {36, 12})).empty());
}

// --- The step ------------------------------------------------------------------------------------

const std::array<Values, 2> kGradients{Values{1, 2, 3, 4}, Values{3, 4, 5, 6}};

TEST_CASE("After a step all ranks have the values of one process", "[task06.2]") {
  TwoRanks two;
  HINT("do both ranks make the same calls, in the same order, and none that a step does not need?");
  two.step(kGradients);
  {
    HINT("rank 0's own shard did not move: is the optimizer's step there?");
    CHECK(two.values(0)[0] != 100);
  }
  {
    HINT(
        "rank 0's own gradient alone moved its shard, or it was divided twice: the others' belong "
        "to it, before the update, and the reduction can average");
    CHECK(two.values(0)[0] != 99);
  }
  {
    HINT(
        "the shard moved by the sum of both ranks' gradients, as with twice the learning rate: the "
        "gradient of the whole batch is their average");
    CHECK(two.values(0)[0] != 96);
  }
  for (const size_t rank : {0, 1}) {
    HINT(
        "the other rank has updated its shard: how does this rank come to the new values, and "
        "when? It would go on with stale ones");
    CHECK(two.others(rank) == (rank == 0 ? Values{296, 395} : Values{98, 197}));
  }
  HINT("not the values of one process");
  for (const size_t rank : {0, 1}) CHECK(two.values(rank) == Values{98, 197, 296, 395});
}

TEST_CASE("Steps add up, with a state that each rank has for its shard only", "[task06.2]") {
  TwoRanks two({.momentum = 0.5});
  for (int step = 0; step < 3; ++step) {
    HINT("a rank waits for another: do both make the same calls, in the same order?");
    two.step(kGradients);
  }
  // Gradient g moves a value by g, 1.5 g, 1.75 g.
  HINT("the second step is another one than the first: what is left over from it?");
  for (const size_t rank : {0, 1}) {
    CHECK(two.values(rank) == Values{91.5, 187.25, 283, 378.75});
  }
}

TEST_CASE("A step sends half of the numbers twice", "[task06.2]") {
  TwoRanks two;
  {
    HINT("which call of all ranks is it, and is there one that sends less?");
    two.step(kGradients);
  }
  HINT("one reduce-scatter and one all-gather: more is sent than the shards need");
  for (const auto& rank : two.halves) CHECK(rank->sent == 2 * 2);
}

// --- A unit --------------------------------------------------------------------------------------

using Ends = std::array<Real, 2>;

TEST_CASE("A gathered unit has its own shard and the other rank's", "[task06.3]") {
  OneUnit rank;
  HINT("does the host wait for something? It has to go on and enqueue");
  rank.unit.gather();
  rank.unit.await_values();
  rank.communication.synchronize();
  {
    HINT("the layers look into Parameter::value: does that point into the new memory?");
    REQUIRE(rank.unit.in_order().front()->value.defined());
  }
  {
    HINT("values_ is [length], and has rank 0's shard, rank 1's shard, ...");
    CHECK(rank.ends() == Ends{1, 10});
  }
  {
    HINT("memory is freed in the order of the stream that it was taken from: who reads it last?");
    CHECK(rank.unit.values().home().backend().name() == rank.device.stream.backend().name());
  }
  HINT("messages of all units go over the stream of the communication, in one order");
  REQUIRE(rank.other.gathers.size() == 1);
  CHECK(rank.other.gathers[0].stream.backend().name() == "communication");
  HINT("the communicator counts the message's bytes, as those of parameters: measure()");
  CHECK(rank.other.gathers[0].purpose == Purpose::parameters);
}

TEST_CASE("The gather waits for what the passes have enqueued", "[task06.3]") {
  const ShardKind kind = GENERATE(ShardKind::parameters, ShardKind::optimizer);
  OneUnit rank(kind);
  testing::enqueue(rank.device.stream, [&] { rank.gate.pass(); });
  rank.device.kernels().fill(rank.device.stream, 5, rank.unit.value_shard());  // the update
  {
    HINT("does the host wait for the device? It has to go on and enqueue");
    rank.unit.gather();
  }
  {
    HINT("with ZeRO-1, too, the others have updated their parts: how do they come here?");
    REQUIRE(rank.other.gathers.size() == 1);
  }
  HINT(
      "the shard was sent before the device had updated it, into memory that kernels before may "
      "still use: which event does the communication stream wait for?");
  CHECK(rank.other.done_after_a_while(0) == 0);
  rank.gate.open();
  rank.communication.synchronize();  // do the passes wait, too? see below
  rank.unit.await_values();
  CHECK(rank.ends() == Ends{5, 10});
}

TEST_CASE("The passes wait for the gather when they need the values, and not before",
          "[task06.3]") {
  OneUnit rank;
  rank.messages.pass_times.start();
  rank.other.before_sum = [&] { rank.gate.pass(); };
  {
    HINT("does the host wait for the gather? It has to go on and enqueue");
    rank.unit.gather();
  }
  const Event in_front = rank.device.stream.record();
  const auto begin = testing::Clock::now();
  while (!in_front.done() && testing::seconds_since(begin) < 1) std::this_thread::yield();
  {
    HINT(
        "a unit is fetched ahead while another one computes: the passes stand still from gather() "
        "on. When do they need the values?");
    CHECK(in_front.done());
  }
  {
    HINT("does the host wait for the gather? It has to go on and enqueue");
    rank.unit.await_values();
  }
  testing::enqueue(rank.device.stream, [&] { rank.seen = rank.other.done.load(); });
  rank.other.done_after_a_while(0);
  rank.gate.open();
  rank.device.stream.synchronize();
  {
    HINT(
        "a layer computed before the values were there: which event, recorded where, comes first?");
    CHECK(rank.seen == 1);
  }
  HINT("how long the passes wait is measured: which of messages_'s functions waits and measures?");
  CHECK(rank.messages.pass_times.total("exposed") > 0);
}

TEST_CASE("A freed unit takes no memory", "[task06.3]") {
  OneUnit rank;
  MemoryCounter& memory = rank.device.device->memory();
  const int64_t before = memory.current();
  rank.unit.gather();
  rank.unit.await_values();
  rank.unit.free_values();
  {
    HINT(
        "nobody gives the memory back, and a rank ends up with the whole network: values_ holds "
        "it, and so do the views that layers look into");
    CHECK(memory.current() == before);
    CHECK_FALSE(rank.unit.in_order().front()->value.defined());
  }
  HINT("a unit that is not there may be freed once more");
  rank.unit.free_values();
  CHECK(memory.current() == before);
}

TEST_CASE("A unit that is here, or on its way, is not fetched again", "[task06.3]") {
  OneUnit rank;
  rank.unit.gather();
  rank.unit.gather();
  rank.unit.await_values();
  rank.unit.gather();
  HINT("three calls before the unit is freed: what is the second message for?");
  CHECK(rank.other.gathers.size() == 1);
  rank.unit.free_values();
  rank.unit.gather();
  rank.unit.await_values();
  HINT("freed values have to be fetched anew");
  CHECK(rank.other.gathers.size() == 2);
  CHECK(rank.ends() == Ends{1, 10});
}

TEST_CASE("A gather that nobody used is over before its memory is given back", "[task06.3]") {
  OneUnit rank;
  rank.other.before_sum = [&] { rank.gate.pass(); };
  rank.unit.gather();
  {
    HINT("does the host wait for the gather? It has to go on and enqueue");
    rank.unit.free_values();
  }
  testing::enqueue(rank.device.stream, [&] { rank.seen = rank.other.done.load(); });
  HINT(
      "the gather writes to memory that was given back: memory is freed in the order of the "
      "passes, and they have not waited for it");
  rank.other.done_after_a_while(0);
  rank.gate.open();
  rank.communication.synchronize();
  rank.device.stream.synchronize();
  CHECK(rank.seen == 1);
}

TEST_CASE("Values that a rank keeps are gathered in place and stay", "[task06.3]") {
  for (const ShardKind kind : {ShardKind::optimizer, ShardKind::gradients}) {
    OneUnit rank(kind);
    const Real* const place = rank.unit.values().data();
    HINT(
        "with ZeRO-1 the whole is always there, and what the others updated comes into it; with "
        "ZeRO-2 likewise");
    rank.unit.gather();
    rank.unit.await_values();
    rank.unit.free_values();
    REQUIRE(rank.unit.in_order().front()->value.defined());
    CHECK(rank.unit.values().data() == place);
    CHECK(rank.ends() == Ends{1, 10});
    rank.unit.gather();
    HINT("nothing was given back, and nothing updated since: what is the second message for?");
    CHECK(rank.other.gathers.size() == 1);
  }
  OneUnit rank(ShardKind::none);
  rank.unit.gather();
  rank.unit.free_values();
  rank.unit.gather();
  HINT("where nothing is shared out, every rank has the whole: what is the message for?");
  CHECK(rank.other.gathers.empty());
}

// --- The norm ------------------------------------------------------------------------------------

TEST_CASE("The squares of all shards are added up", "[task06.4]") {
  for (const ShardKind kind : {ShardKind::optimizer, ShardKind::gradients, ShardKind::parameters}) {
    Norm rank(kind);
    {
      HINT("all ranks clip, and need the sum for it; the host has to go on and enqueue");
      rank.sharded.sum_over_shards(rank.squares);
    }
    rank.communication.synchronize();
    {
      HINT(
          "this is the square of one shard's norm: each rank would clip by another factor. With "
          "which ways of sharding does a rank have the gradients of its shard only?");
      CHECK(rank.squares.to_host()[0] != 4);
    }
    HINT("the square of the whole norm is the sum of the shards' squares");
    CHECK(rank.squares.to_host()[0] == 14);
    HINT(
        "messages of a step go over one stream: ranks could come to wait for each other crosswise");
    REQUIRE(rank.other.sums.size() == 1);
    CHECK(rank.other.sums[0].stream.backend().name() == "communication");
  }
}

TEST_CASE("Where nothing is shared out, the squares are those of all already", "[task06.4]") {
  Norm rank(ShardKind::none);
  rank.sharded.sum_over_shards(rank.squares);
  rank.communication.synchronize();
  HINT("every rank has the gradients of all parameters here: they are counted once for each rank");
  CHECK(rank.squares.to_host()[0] == 4);
}

TEST_CASE("The sum waits for the squares, and the clipping for the sum", "[task06.4]") {
  SECTION("a slow kernel makes the squares") {
    Norm rank;
    testing::enqueue(rank.device.stream, [&] { rank.gate.pass(); });
    rank.device.kernels().fill(rank.device.stream, 5, rank.squares);
    {
      HINT("does the host wait for the device? It has to go on and enqueue");
      rank.sharded.sum_over_shards(rank.squares);
    }
    HINT("the squares were sent before the device had made them: who waits for the passes?");
    CHECK(rank.other.done_after_a_while(0) == 0);
    rank.gate.open();
    rank.communication.synchronize();
    CHECK(rank.squares.to_host()[0] == 15);
  }
  SECTION("the other rank is slow") {
    std::atomic<int> sums_done = -1;  // when the passes go on
    Norm rank;
    rank.other.before_sum = [&] { rank.gate.pass(); };
    rank.sharded.sum_over_shards(rank.squares);
    testing::enqueue(rank.device.stream, [&] { sums_done = rank.other.done.load(); });
    rank.other.done_after_a_while(0);
    rank.gate.open();
    rank.device.stream.synchronize();
    HINT("the gradients were clipped before the other rank's squares were there");
    CHECK(sums_done == 1);
  }
}

// --- Joining -------------------------------------------------------------------------------------

/// "1: 2 at 3 -> 0": elements [3, 5) of saved piece 1 are the first of the wanted ones. Throws what
/// join_shards() throws.
std::string joined(const std::vector<FlatRange>& saved, FlatRange wanted) {
  std::vector<std::string> texts;
  for (const Extract& extract : join_shards(saved, wanted)) {
    texts.push_back(fmt::format("{}: {} at {} -> {}", extract.saved, extract.of_saved.count,
                                extract.of_saved.first, extract.in_wanted));
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

/// What is wrong with them, in words; "accepted" if nothing is.
std::string refused(const std::vector<FlatRange>& saved, FlatRange wanted) {
  try {
    join_shards(saved, wanted);
    return "accepted";
  } catch (const BadInput& error) {
    return error.what();
  }
}

TEST_CASE("The same shards again", "[task06.5]") {
  HINT(
      "as many ranks as before: each shard comes from one file, as a whole, and there is no empty "
      "extract from another");
  CHECK(joined({{0, 6}, {6, 6}}, {0, 6}) == "0: 6 at 0 -> 0");
  {
    HINT("a place is counted from the first element of its own piece, here and there");
    CHECK(joined({{0, 6}, {6, 6}}, {6, 6}) == "1: 6 at 0 -> 0");
  }
}

TEST_CASE("Fewer ranks and more ranks than were saved", "[task06.5]") {
  {
    HINT("fewer ranks than before: a shard comes from several files, one part behind the other");
    CHECK(joined({{0, 4}, {4, 4}, {8, 4}}, {0, 12}) ==
          "0: 4 at 0 -> 0, 1: 4 at 0 -> 4, 2: 4 at 0 -> 8");
  }
  {
    HINT("more ranks than before: from which of the saved elements on, and how many of them?");
    CHECK(joined({{0, 12}}, {4, 4}) == "0: 4 at 4 -> 0");
  }
  HINT("2 ranks become 3: the middle one takes the end of one file and the beginning of the other");
  CHECK(joined({{0, 6}, {6, 6}}, {4, 4}) == "0: 2 at 4 -> 0, 1: 2 at 0 -> 2");
}

TEST_CASE("Files without a part of the parameter, in any order", "[task06.5]") {
  {
    HINT("a file may have nothing of this parameter, or nothing that is wanted: no empty extract");
    CHECK(joined({{0, 4}, {4, 0}, {4, 4}, {8, 4}}, {4, 4}) == "2: 4 at 0 -> 0");
  }
  {
    HINT("nothing is wanted, so nothing is read, and nothing is missing");
    CHECK(joined({{0, 4}}, {4, 0}).empty());
  }
  HINT(
      "the saved pieces come in any order: the extracts follow each other as they are wanted, and "
      "each names its piece by its place in the list");
  CHECK(joined({{8, 4}, {0, 4}, {4, 4}}, {2, 8}) ==
        "1: 2 at 2 -> 0, 2: 4 at 0 -> 2, 0: 2 at 0 -> 6");
}

TEST_CASE("What is missing or there twice is refused by its number", "[task06.5]") {
  using Catch::Matchers::ContainsSubstring;
  const auto names = [](int element) {
    return ContainsSubstring(fmt::format("element {} ", element));
  };
  {
    HINT("a file is missing in the middle: its elements would stay what they were");
    CHECK_THAT(refused({{0, 4}, {8, 4}}, {2, 8}), names(4));
  }
  {
    HINT("the first wanted elements are in no file");
    CHECK_THAT(refused({{4, 4}}, {2, 4}), names(2));
  }
  {
    HINT("the last wanted elements are in no file");
    CHECK_THAT(refused({{0, 4}, {4, 4}}, {6, 4}), names(8));
    CHECK_THAT(refused({}, {0, 1}), names(0));
  }
  {
    HINT("two files have the same elements: which of them is right?");
    CHECK_THAT(refused({{0, 6}, {4, 6}}, {0, 10}), names(4));
    CHECK_THAT(refused({{0, 4}, {0, 4}}, {0, 4}), names(0));
  }
  {
    HINT("the first element that is wrong is named, be it missing or there twice");
    CHECK_THAT(refused({{0, 6}, {4, 2}}, {0, 10}), names(4));
  }
  HINT("elements that nobody wants may be missing, or be there twice");
  CHECK(joined({{0, 4}, {4, 4}, {0, 2}}, {4, 4}) == "1: 4 at 0 -> 0");
}

}  // namespace
}  // namespace lockstep
