// Ranks that disagree, and calls that cannot be right.

#include <functional>
#include <string>
#include <vector>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/unit/comm/comm_test_support.h"

namespace lockstep {
namespace {

using namespace testing::comm;
using Catch::Matchers::ContainsSubstring;
using testing::device_ids;
using testing::message_of;
using testing::numbered;
using testing::Ranks;
using Floats = BasicTensor<float>;
using Doubles = BasicTensor<double>;
using Wholes = BasicTensor<int64_t>;

}  // namespace

// --- Ranks that disagree -------------------------------------------------------------------------

namespace {

struct Disagreement {
  std::string name;
  Calls zero, one;
  std::vector<std::string> said;  // of the error, beside both ranks
};

std::vector<Disagreement> disagreements(const Floats& x, const Doubles& d) {
  const Elements few(x.data(), 3, ElementType::f32), many(x.data(), 4, ElementType::f32);
  const auto all_reduce = [](Elements e, Reduction reduction = Reduction::sum) -> Calls {
    return [=](Communicator& rank, Stream s) { rank.all_reduce(s, e, reduction); };
  };
  const auto broadcast = [](Elements e, int root) -> Calls {
    return [=](Communicator& rank, Stream s) { rank.broadcast(s, e, root); };
  };
  const auto send = [](Elements e, int to) -> Calls {
    return [=](Communicator& rank, Stream s) { rank.send(s, e, to); };
  };
  const auto receive = [](Elements e, int from) -> Calls {
    return [=](Communicator& rank, Stream s) { rank.receive(s, e, from); };
  };
  const auto both = [](Calls first, Calls second) -> Calls {
    return [=](Communicator& rank, Stream s) { first(rank, s), second(rank, s); };
  };
  const Calls nothing = [](Communicator&, Stream) {};
  return {
      {"count", all_reduce(few), all_reduce(many), {"all_reduce of 3 f32", "all_reduce of 4 f32"}},
      {"type", all_reduce(many), all_reduce(d), {"4 f32", "4 f64"}},
      {"operation", all_reduce(few), broadcast(few, 0), {"all_reduce of 3", "broadcast of 3"}},
      {"reduction", all_reduce(few), all_reduce(few, Reduction::average), {"sum", "average"}},
      {"root", broadcast(few, 0), broadcast(few, 1), {"root 0", "root 1"}},
      {"order",
       both(all_reduce(few), broadcast(many, 0)),
       both(broadcast(many, 0), all_reduce(few)),
       {"collective 1 ", "all_reduce of 3", "broadcast of 4"}},
      {"the second call",
       both(all_reduce(few), broadcast(few, 0)),
       both(all_reduce(few), broadcast(many, 0)),
       {"collective 2 ", "broadcast of 3", "broadcast of 4"}},
      {"fewer calls",
       both(all_reduce(few), broadcast(many, 0)),
       all_reduce(few),
       {"collective 2 ", "broadcast of 4", "rank 1 (cpu:1) called nothing"}},
      {"no call", nothing, all_reduce(few), {"rank 0 (cpu:0) called nothing", "all_reduce of 3"}},
      {"a barrier alone",
       [](Communicator& rank, Stream s) { rank.barrier(s); },
       nothing,
       {"barrier", "rank 1 (cpu:1) called nothing"}},
      {"a send alone",
       send(few, 1),
       nothing,
       {"send of 3 f32 to rank 1", "rank 1 (cpu:1) called nothing"}},
      {"a receive alone",
       nothing,
       receive(few, 0),
       {"receive of 3 f32 from rank 0", "rank 0 (cpu:0) called nothing"}},
      {"two receives of one send",
       send(few, 1),
       both(receive(few, 0), receive(few, 0)),
       {"transfer 2 ", "receive of 3 f32", "rank 0 (cpu:0) called nothing"}},
      {"a transfer's count", send(few, 1), receive(many, 0), {"send of 3", "receive of 4"}},
      {"a transfer's type", send(many, 1), receive(d, 0), {"send of 4 f32", "receive of 4 f64"}},
  };
}

}  // namespace

TEST_CASE("A disagreement of ranks names both, what each called, and the group", "[comm][row71]") {
  const size_t cases = [] {
    Ranks ranks(device_ids(1));
    const Stream s = ranks.streams[0];
    return disagreements(Floats::empty(s, {4}), Doubles::empty(s, {4})).size();
  }();
  for (size_t i = 0; i < cases; ++i) {
    Ranks ranks(device_ids(2));
    const auto x = numbered<float>(ranks, 4, 1);
    const auto d = numbered<double>(ranks, 4, 1);
    CHECK(counts_its_ranks(ranks));  // group 1
    const Disagreement wrong = disagreements(x[0], d[1])[i];
    const std::string text = error_of_group<PeerLost>(ranks, {wrong.zero, wrong.one});
    INFO(wrong.name << ": " << text);
    CHECK_THAT(text, ContainsSubstring("group 2"));
    CHECK_THAT(text, ContainsSubstring("rank 0 (cpu:0)") && ContainsSubstring("rank 1 (cpu:1)"));
    for (const std::string& part : wrong.said) CHECK_THAT(text, ContainsSubstring(part));
    // Nothing of it was enqueued, and nothing can follow.
    ranks.synchronize();
    CHECK(x[0].to_host() == std::vector<float>(4, 1));
    CHECK(message_of<PeerLost>([&] { const CollectiveGroup next(*ranks.world); }) == text);
    CHECK(message_of<PeerLost>([&] { counts_its_ranks(ranks); }) == text);
  }
}

TEST_CASE("Of eight ranks the one that disagrees is named", "[comm][row71]") {
  for (const int wrong : {1, 4, 7}) {
    Ranks ranks(device_ids(8));
    const auto x = numbered<float>(ranks, 4, 1);
    const std::string text = message_of<PeerLost>([&] {
      ranks.together([&](Communicator& rank, Stream stream) {
        const int me = rank.rank();
        rank.all_reduce(stream, x[me]);
        if (me != wrong) rank.barrier(stream);
      });
    });
    INFO(text);
    CHECK_THAT(text, ContainsSubstring(fmt::format("rank {0} (cpu:{0}) called nothing", wrong)));
    for (int rank = 0; rank < 8; ++rank) {
      ranks.streams[rank].synchronize();
      CHECK(x[rank].to_host() == std::vector<float>(4, float(1 + rank)));
    }
  }
}

TEST_CASE("The same count in other parts is no disagreement: only numbers, types and roots count",
          "[comm]") {
  Ranks ranks(device_ids(2));
  const auto x = numbered<float>(ranks, 8, 1);
  ranks.together([&](Communicator& rank, Stream stream) {
    const Elements mine = x[rank.rank()];
    rank.all_reduce(stream, rank.rank() == 0 ? mine.part(0, 3) : mine.part(5, 3));
  });
  CHECK(x[0].to_host() == std::vector<float>{3, 3, 3, 1, 1, 1, 1, 1});
  CHECK(x[1].to_host() == std::vector<float>{2, 2, 2, 2, 2, 3, 3, 3});
}

// --- Arguments that cannot be right --------------------------------------------------------------

namespace {

struct Mistake {
  std::string name;
  Calls call;
  std::vector<std::string> said;
};

std::vector<Mistake> mistakes(const Floats& x, const Wholes& w, const Floats& other) {
  const Stream elsewhere = other.home();
  const Elements three(x.data(), 3, ElementType::f32), seven(x.data(), 7, ElementType::f32);
  const Elements six(w.data(), 6, ElementType::i64), whole(w.data(), 3, ElementType::i64);
  const auto average = Reduction::average;
  return {
      {"root too large",
       [=](Communicator& r, Stream s) { r.broadcast(s, three, 2); },
       {"broadcast of 3 f32, root 2", "ranks 0 to 1"}},
      {"root negative",
       [=](Communicator& r, Stream s) { r.reduce(s, three, -1); },
       {"root -1", "ranks 0 to 1"}},
      {"receiver unknown",
       [=](Communicator& r, Stream s) { r.send(s, three, 5); },
       {"to rank 5", "ranks 0 to 1"}},
      {"sender unknown",
       [=](Communicator& r, Stream s) { r.receive(s, three, -3); },
       {"from rank -3", "ranks 0 to 1"}},
      {"itself", [=](Communicator& r, Stream s) { r.send(s, three, 1); }, {"to rank 1", "itself"}},
      {"parts of all_gather",
       [=](Communicator& r, Stream s) { r.all_gather(s, three, seven); },
       {"all_gather", "must be 6 f32", "found 7 f32"}},
      {"parts of reduce_scatter",
       [=](Communicator& r, Stream s) { r.reduce_scatter(s, seven, three); },
       {"reduce_scatter", "must be 6 f32", "found 7 f32"}},
      {"parts of gather",
       [=](Communicator& r, Stream s) { r.gather(s, three, {}, 1); },
       {"gather", "must be 6 f32", "found 0 f32"}},
      {"type of the parts of scatter",
       [=](Communicator& r, Stream s) { r.scatter(s, six, three, 1); },
       {"scatter", "must be 6 f32", "found 6 i64"}},
      {"average of whole numbers",
       [=](Communicator& r, Stream s) { r.all_reduce(s, whole, average); },
       {"all_reduce of 3 i64", "whole numbers have no average"}},
      {"average of whole numbers at a root",
       [=](Communicator& r, Stream s) { r.reduce(s, whole, 0, average); },
       {"whole numbers have no average"}},
      {"average of parts of whole numbers",
       [=](Communicator& r, Stream s) { r.reduce_scatter(s, six, whole, average); },
       {"whole numbers have no average"}},
      {"a stream of another device",
       [=](Communicator& r, Stream) { r.all_reduce(elsewhere, three); },
       {"cpu:0", "cpu:1", "stream"}},
      {"a tensor of another device",
       [=](Communicator& r, Stream s) { r.all_reduce(s, other); },
       {"all_reduce of 8 f32, sum on a stream of cpu:1, its tensor is on cpu:0; copy it there"}},
      {"a part of a tensor of another device",
       [=](Communicator& r, Stream s) { r.all_gather(s, three, Elements(other).part(0, 6)); },
       {"all_gather of 3 f32 on a stream of cpu:1, its tensor is on cpu:0"}},
  };
}

}  // namespace

TEST_CASE("A call that cannot be right is refused by its rank, and the world stays usable",
          "[comm]") {
  Ranks ranks(device_ids(2));
  const auto x = numbered<float>(ranks, 8, 1);
  const auto w = numbered<int64_t>(ranks, 8, 1);
  for (const Mistake& mistake : mistakes(x[1], w[1], x[0])) {
    const Calls right = [&](Communicator& rank, Stream s) { rank.all_reduce(s, x[rank.rank()]); };
    const std::string text = error_of_group<BadInput>(ranks, {right, mistake.call});
    INFO(mistake.name << ": " << text);
    CHECK_THAT(text, ContainsSubstring("rank 1: "));
    for (const std::string& part : mistake.said) CHECK_THAT(text, ContainsSubstring(part));
    CHECK(counts_its_ranks(ranks));
  }
  ranks.synchronize();  // of the refused groups nothing was enqueued, not even the right calls
  CHECK(x[0].to_host() == std::vector<float>(8, 1));
}

TEST_CASE("A call outside a group is refused", "[comm]") {
  Ranks ranks(device_ids(2));
  const auto x = numbered<float>(ranks, 4, 1);
  const auto call = [&] { ranks.world->communicator(1).all_reduce(ranks.streams[1], x[1]); };
  CHECK_THAT(message_of<BadInput>(call),
             ContainsSubstring("rank 1: all_reduce of 4 f32, sum outside a CollectiveGroup"));
  CHECK(counts_its_ranks(ranks));
  CHECK_THAT(message_of<BadInput>(call), ContainsSubstring("outside"));  // after a group, too
}

TEST_CASE("A group inside a group is refused", "[comm]") {
  Ranks ranks(device_ids(2));
  const std::string text = message_of<BadInput>([&] {
    const CollectiveGroup outer(*ranks.world);
    const CollectiveGroup inner(*ranks.world);
  });
  CHECK_THAT(text, ContainsSubstring("still open"));
  CHECK(counts_its_ranks(ranks));
}

TEST_CASE("An exception within a group leaves as it is, and the calls are forgotten", "[comm]") {
  Ranks ranks(device_ids(2));
  const auto x = numbered<float>(ranks, 4, 1);
  const std::string text = message_of<NonFinite>([&] {
    const CollectiveGroup group(*ranks.world);
    ranks.world->communicator(0).all_reduce(ranks.streams[0], x[0]);
    throw NonFinite("the loss is NaN");
  });
  CHECK(text == "the loss is NaN");
  CHECK(counts_its_ranks(ranks));
  ranks.synchronize();
  CHECK(x[0].to_host() == std::vector<float>(4, 1));
}

TEST_CASE("A group that closes while an older exception is handled still runs and reports",
          "[comm]") {
  Ranks ranks(device_ids(2));
  bool works = false;
  std::string text;
  struct AtTheEnd {  // runs while an exception is on its way
    std::function<void()> action;
    ~AtTheEnd() { action(); }
  };
  const auto clean_up = [&] {
    works = counts_its_ranks(ranks);
    text = message_of<PeerLost>([&] {
      const CollectiveGroup group(*ranks.world);
      ranks.world->communicator(0).barrier(ranks.streams[0]);
    });
  };
  CHECK_THROWS_AS(
      [&] {
        const AtTheEnd last{clean_up};
        throw BadInput("on its way");
      }(),
      BadInput);
  CHECK(works);
  CHECK_THAT(text, ContainsSubstring("rank 1 (cpu:1) called nothing"));
}

}  // namespace lockstep
