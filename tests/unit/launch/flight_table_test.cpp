// What the launcher says of the ranks' last calls.

#include "common/launch/flight_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "common/system/flight_recorder.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;

constexpr int64_t kSecond = 1000000000;
const std::string kReduce = "all_reduce of 5 f32, sum";

/// A rank's recording, written call by call.
struct Rank {
  explicit Rank(int rank, int world_size = 2, uint64_t host = 1) {
    made.log.header.rank = uint64_t(rank);
    made.log.header.world_size = uint64_t(world_size);
    made.log.header.host = {host, 0};
  }
  Rank& call(uint64_t number, double started, double completed, const std::string& text = kReduce) {
    FlightEntry entry{.record = made.log.entries.size() + 1,
                      .number = number,
                      .created_ns = kSecond,
                      .started_ns = int64_t(started * kSecond),
                      .completed_ns = int64_t(completed * kSecond)};
    put_flight_text(entry.text, text);
    made.log.entries.push_back(entry);
    return *this;
  }
  Rank& in(uint64_t group, uint64_t members) {
    made.log.entries.back().group = group;
    made.log.entries.back().members = members;
    return *this;
  }
  Rank& transfer_with(uint64_t members) {
    made.log.entries.back().kind = kTransfers;
    return in(0, members);
  }
  Rank& gave_up(double seconds) {
    made.log.gave_up_ns = int64_t(seconds * kSecond);
    return *this;
  }
  Rank& ended(const std::string& how, bool failed) {
    made.end = how;
    made.failed = failed;
    return *this;
  }
  FlightRank made{};
};

/// The table of a moment 20 s after the clock's beginning.
std::string printed_table(const std::vector<Rank>& ranks, int64_t now_ns = 20 * kSecond) {
  std::vector<FlightRank> all;
  for (const Rank& rank : ranks) all.push_back(rank.made);
  const std::vector<std::string> lines = flight_table(all, now_ns);
  CHECK(lines.size() <= 12);
  const std::string text = fmt::format("{}", fmt::join(lines, "\n"));
  UNSCOPED_INFO(text);
  return text;
}

TEST_CASE("A rank that has not come to a call is late, since the others wait there", "[flight]") {
  const Rank waits = Rank(0, 3).call(1, 2, 3).call(2, 10, 0);
  const Rank also = Rank(2, 3).call(1, 2, 3).call(2, 11, 0);
  Rank late = Rank(1, 3).call(1, 2.5, 3);
  const std::string text = printed_table({waits, late, also});
  CHECK_THAT(text, ContainsSubstring("rank 1 is late: ranks 0, 2 have waited in call 2 (" +
                                     kReduce + ") since ") &&
                       ContainsSubstring("(10.00 s); rank 1 has not made that call: look at what "
                                         "its host does after call 1"));
  CHECK_THAT(text, ContainsSubstring("\n  0, 2    2     in it              10.00 s   " + kReduce) &&
                       ContainsSubstring("\n  1       1     ended, none since  17.00 s   "));
  late.call(2, 0, 0);
  CHECK_THAT(printed_table({waits, late, also}),
             ContainsSubstring("rank 1 has made that call, but its device still does what comes "
                               "before"));
  CHECK_THAT(printed_table({waits, Rank(1, 3), also}),
             ContainsSubstring("rank 1 has made no call yet"));
  CHECK_THAT(printed_table({waits, also}), ContainsSubstring("(2 of 3 ranks)") &&
                                               ContainsSubstring("rank 1 left no recording here"));
  CHECK_THAT(printed_table({waits, Rank(late).ended("exited with status 0", false), also}),
             ContainsSubstring("rank 1 exited with status 0"));
}

TEST_CASE("A rank that has gone on to later calls has come to the earlier ones", "[flight]") {
  const Rank waits = Rank(0, 3).call(2, 10, 0), late = Rank(2, 3).call(1, 2, 3);
  const Rank ahead = Rank(1, 3).call(66, 11, 12);  // whose recording has lost call 2
  CHECK_THAT(printed_table({waits, ahead, late}),
             ContainsSubstring("rank 2 is late: rank 0 has waited in call 2"));
}

TEST_CASE("The rank that gave up first is not taken for the cause", "[flight]") {
  Rank first = Rank(0, 3).call(1, 10, 0).in(1, 0b011).gave_up(13);
  Rank middle = Rank(1, 3).call(1, 11, 0).in(2, 0b110).gave_up(14);
  const Rank late = Rank(2, 3).call(1, 1, 2, "barrier");
  const std::string text = printed_table({first, middle, late});
  CHECK_THAT(text, ContainsSubstring("rank 2 is late: rank 1 has waited in call 1 (" + kReduce +
                                     ", group of ranks 1, 2)"));
  CHECK_THAT(text, EndsWith("rank 0, which gave up first, is not the cause: it waited for rank 1, "
                            "which waited for rank 2"));
}

TEST_CASE("A rank that a signal has ended or stopped is the cause, wherever it was", "[flight]") {
  const Rank waits = Rank(0).call(1, 2, 3).call(2, 10, 0).gave_up(12);
  Rank killed = Rank(1).call(1, 2.5, 3).call(2, 10, 0);
  killed.ended("was killed by signal 9 (SIGKILL)", true);
  CHECK_THAT(printed_table({waits, killed}),
             ContainsSubstring("rank 1 was killed by signal 9 (SIGKILL), in call 2") &&
                 !ContainsSubstring("nobody is late"));
}

TEST_CASE("A rank's place among the others stands beside its number", "[flight]") {
  const Rank waits = Rank(0).call(1, 2, 3).call(2, 10, 0).gave_up(12);
  Rank killed = Rank(1).call(1, 2.5, 3).call(2, 10, 0);
  killed.made.log.place = "data 1, tensor 0";
  killed.ended("was killed by signal 9 (SIGKILL)", true);
  CHECK_THAT(printed_table({waits, killed}),
             ContainsSubstring("rank 1 (data 1, tensor 0) was killed by signal 9 (SIGKILL), in"));
}

TEST_CASE("A rank that ended because it lost a peer is not the cause", "[flight]") {
  const FlightMemory memory(0, 2);
  const testing::ScopedEnvironment told(kFlightMemory, flight_memory(memory.descriptor()));
  FlightRecorder first(0, 2, 0, ""), second(1, 2, 1, "");
  FlightEntry call{.number = 1};
  put_flight_text(call.text, kReduce);
  FlightCall waits(&first, call);
  waits.start();
  waits.give_up();
  const auto told_of = [&](const RankEnd& end) {
    return fmt::format("{}", fmt::join(memory.table({end}, end), "\n"));
  };
  CHECK_THAT(told_of({.rank = 0, .status = 2}), ContainsSubstring("rank 1 is late: rank 0 has"));
  CHECK_THAT(told_of({.rank = 0, .status = 1}),
             ContainsSubstring("rank 0 exited with status 1, in call 1"));
}

TEST_CASE("Calls that differ are told from the first on", "[flight]") {
  const Rank one = Rank(0).call(1, 2, 3).call(2, 4, 0, "barrier");
  const Rank other = Rank(1).call(1, 2, 3).call(2, 4, 5).call(3, 6, 0);
  CHECK_THAT(printed_table({one, other}),
             EndsWith("the calls differ: call 2 is barrier on rank 0, and " + kReduce +
                      " on rank 1; all ranks must make the same calls in the same order"));
}

TEST_CASE("Ranks in transfers wait for their peers", "[flight]") {
  const Rank sends = Rank(0, 3).call(4, 5, 0, "send of 1 f32 to rank 1").transfer_with(0b010);
  const Rank receives =
      Rank(1, 3).call(9, 6, 0, "receive of 1 f32 from rank 2").transfer_with(0b100);
  const Rank elsewhere = Rank(2, 3).call(3, 1, 2);
  CHECK_THAT(printed_table({sends, receives, elsewhere}),
             ContainsSubstring("rank 2 is late: rank 1 has waited in transfer 9"));
  // Their numbers and texts are each rank's own.
  const Rank sent = Rank(0).call(1, 2, 3, "send of 1 f32 to rank 1").transfer_with(0b10);
  const Rank received = Rank(1).call(1, 2, 3, "receive of 1 f32 from rank 0").transfer_with(0b01);
  CHECK_THAT(printed_table({sent, received}), !ContainsSubstring("the calls differ"));
  const Rank back = Rank(2, 3).call(2, 6, 0, "receive of 1 f32 from rank 0").transfer_with(0b001);
  CHECK_THAT(printed_table({sends, receives, back}),
             ContainsSubstring("ranks 0, 1, 2 wait for each other"));
  // In a group the text has the peer's number there; it needs rank 2 of the job.
  Rank in_group = Rank(0, 3).call(1, 5, 0, "receive of 1 f32 from rank 1").transfer_with(0b100);
  in_group.made.log.entries.back().group = 7;
  CHECK_THAT(printed_table({in_group, elsewhere}),
             ContainsSubstring("receive of 1 f32 from rank 1, in a group: rank 2 of the job"));
}

TEST_CASE("Where all ranks have come, nobody is late", "[flight]") {
  const Rank one = Rank(0).call(1, 2, 0), other = Rank(1).call(1, 2, 0);
  CHECK_THAT(printed_table({one, other}),
             ContainsSubstring("nobody is late: all ranks have come to their call"));
  CHECK_THAT(printed_table({Rank(one).gave_up(9), other}),
             ContainsSubstring("nobody is late, but rank 1 did not give up as the others did"));
  CHECK_THAT(printed_table({Rank(0).call(1, 2, 3), Rank(1).call(1, 2, 3)}),
             ContainsSubstring("nobody is late: no rank waited for another"));
  CHECK(flight_table({Rank(0).made, Rank(1).made}, kSecond).empty());
}

TEST_CASE("Hosts' clocks are put on one by the ends of common calls, or not compared", "[flight]") {
  Rank here = Rank(0), there = Rank(1, 2, 2);  // whose clock is 1000 s ahead
  for (uint64_t number = 1; number <= 5; ++number) {
    here.call(number, double(number), double(number) + 0.5);
    there.call(number, 1000.2 + double(number), 1000.5 + double(number) + (number == 3 ? 7 : 0));
  }
  there.call(6, 1010, 0);
  CHECK_THAT(printed_table({here, there}),
             ContainsSubstring("rank 0 is late: rank 1 has waited in call 6") &&
                 ContainsSubstring("(10.00 s)") &&
                 ContainsSubstring("put on one clock by the ends of 5 calls"));
  const std::string apart = printed_table({Rank(0).call(1, 2, 3), Rank(1, 2, 2).call(2, 1010, 0)});
  CHECK_THAT(apart, ContainsSubstring("no times: the ranks' hosts have different clocks") &&
                        !ContainsSubstring(" s)"));
}

TEST_CASE("A table of recordings in files ends with the last time that is in them", "[flight]") {
  const Rank waits = Rank(0).call(1, 2, 0).gave_up(7.5), late = Rank(1).call(1, 0, 0);
  CHECK_THAT(printed_table({waits, late}, 0), ContainsSubstring("(5.50 s)"));
}

TEST_CASE("Columns stay apart, however long a time or a number is", "[flight]") {
  const Rank waits = Rank(0).call(1234567, 10, 0), late = Rank(1).call(1234566, 1, 2);
  CHECK_THAT(printed_table({waits, late}, 100'000'000 * kSecond),
             ContainsSubstring("0       1234567 in it              99999990.00 s ") &&
                 ContainsSubstring("1       1234566 ended, none since  99999998.00 s "));
}

TEST_CASE("A table of many ranks stays short", "[flight]") {
  std::vector<Rank> ranks;
  for (int rank = 0; rank < 200; ++rank) {
    ranks.push_back(Rank(rank, 200).call(1, 2, 3).call(2 + uint64_t(rank % 17), 9, 0));
  }
  ranks[77] = Rank(77, 200).call(1, 2, 3);
  const std::string text = printed_table(ranks);
  CHECK_THAT(text, ContainsSubstring("\n  77      1     ended, none since") &&
                       ContainsSubstring("... and 12 more rows") &&
                       ContainsSubstring("rank 77 is late"));
}

}  // namespace
}  // namespace lockstep
