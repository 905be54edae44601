// Grades stage 04: the ring (04.1).

#include <algorithm>
#include <cmath>
#include <deque>

#include "04-ddp/all_reduce.h"
#include "tests/coursework/hint.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tasks.h"
#include "tests/support/tcp_stores.h"

namespace lockstep {
namespace {

using testing::Ranks;
using Values = std::vector<Real>;

constexpr double kPatience = 3;  // seconds until a rank gives up waiting for another

/// A rank that sends and receives: all that the ring needs.
class Neighbour final : public Communicator {
 public:
  explicit Neighbour(Communicator& comm)
      : Communicator(comm.rank(), comm.world_size()), comm_(comm) {}

  int64_t messages = 0;  // sent and received

 private:
  void enqueue(Stream stream, const std::vector<Call>& together, FlightCall) override {
    comm_.open_group();
    for (const Call& call : together) {
      require(call.is_transfer(), "{}: expected send and receive only", call.text());
      if (call.op == Call::Op::send) comm_.send(stream, call.mine, call.peer);
      if (call.op == Call::Op::receive) comm_.receive(stream, call.mine, call.peer);
      ++messages;
    }
    comm_.close_group();
  }
  Communicator& comm_;
};

/// What all ranks have after the ring, where rank r's number i was 10^r (i + 1), and the bytes that
/// each of them sent.
struct RingResult {
  RingResult(int world_size, int64_t count) : ranks(testing::tcp_ranks(world_size, kPatience)) {
    std::vector<Tensor> x;
    std::deque<Neighbour> neighbours;
    std::deque<AllReduce> reduce;
    Real factor = 1;
    expected.assign(static_cast<size_t>(count), 0);
    for (size_t rank = 0; rank < ranks.streams.size(); ++rank, factor *= 10) {
      Values values;
      for (int64_t i = 0; i < count; ++i) values.push_back(factor * Real(i + 1));
      for (size_t i = 0; i < values.size(); ++i) expected[i] += values[i];
      x.push_back(Tensor::from_host(ranks.streams[rank], {count}, values));
      neighbours.emplace_back(*ranks.comms[rank]);
      reduce.emplace_back(neighbours.back(), AllReduceKind::ring, ranks.streams[rank]);
      reduce.back()(x.back());
    }
    for (const Tensor& sum : x) found.push_back(sum.to_host());
    for (const auto& comm : ranks.comms) bytes_sent.push_back(comm->bytes_sent());
  }
  Ranks ranks;
  Values expected;
  std::vector<Values> found;
  std::vector<int64_t> bytes_sent;
};

/// Rank 0 of three, whose neighbours are played: whatever it receives is 10, as soon as the device
/// is let go. Groups are kept to: their calls are enqueued when they are closed.
class Alone final : public Communicator {
 public:
  Alone() : Communicator(0, 3) {}
  ~Alone() override { gate.open(); }
  struct Message {
    const Real* data;
    Real first;  // its first number, when it was sent
  };
  testing::Gate gate{kPatience};
  std::vector<Message> sent, received;  // by the device; one of each in a round

 private:
  void enqueue(Stream stream, const std::vector<Call>& together, FlightCall) override {
    const Call &one = together.front(), &other = together.back();
    require(one.is_transfer(), "{}: expected send and receive only", one.text());
    require(together.size() > 1,
            "{} outside a group: what makes a send and a receive go on at the same time?",
            one.text());
    require(together.size() == 2 && one.op != other.op,
            "a group of {} calls, expected one send and one receive: a round needs what the round "
            "before it brought",
            together.size());
    for (const Call& call : together) {
      testing::enqueue(stream, [this, x = call.mine, sends = call.op == Call::Op::send] {
        gate.pass();
        Real* const values = static_cast<Real*>(x.data);
        if (!sends) std::fill_n(values, x.count, Real(10));
        (sends ? sent : received).push_back({values, values[0]});
      });
    }
  }
};

/// What rank 0 of three did with 1, 2 and 3.
struct RankAlone {
  RankAlone() {
    HINT(
        "every round is one group, a send to the right and a receive from the left, also of the "
        "first and the last rank; all are enqueued: does the host wait for the device?");
    reduce(x);
    rank.gate.open();
    device.stream.synchronize();
  }
  bool in_place(const Alone::Message& message) const {
    return message.data >= x.data() && message.data < x.data() + 3;
  }
  testing::TestDevice device;
  Alone rank;
  const Tensor x = device.put({3}, {1, 2, 3});
  AllReduce reduce{rank, AllReduceKind::ring, device.stream};
  const std::vector<Alone::Message>&sent = rank.sent, &received = rank.received;
};

TEST_CASE("What one rank of three sends and receives", "[task04.1]") {
  const RankAlone one;
  {
    HINT("W-1 rounds that add up, then W-1 that hand on: does a rank make more, or fewer?");
    REQUIRE(one.sent.size() == 4);
    REQUIRE(one.received.size() == 4);
  }
  {
    HINT("a part that comes in the reduce-scatter is to be added to: it may not cover one's own");
    CHECK_FALSE((one.in_place(one.received[0]) || one.in_place(one.received[1])));
  }
  {
    HINT("a part that comes in the all-gather is complete: does it stay in memory beside x?");
    CHECK((one.in_place(one.received[2]) && one.in_place(one.received[3])));
  }
  HINT(
      "the all-gather begins with the part that is complete on this rank, which is the one that it "
      "has not sent yet");
  CHECK(one.sent[2].data != one.sent[0].data);
  CHECK(one.sent[2].data != one.sent[1].data);
  HINT(
      "a round of the all-gather hands on what came in the round before it: is the part that comes "
      "put in its own place?");
  CHECK(one.received[2].data == one.sent[3].data);
  CHECK(one.received[3].data != one.received[2].data);
}

TEST_CASE("What one rank of three adds up", "[task04.1]") {
  const RankAlone one;
  for (const size_t round : {1u, 2u}) {
    HINT(
        "10 has come to be added to a part, which is sent on in the next round, and lacks it. Had "
        "the 10 come when it was added (a group's calls are enqueued when the group is closed)? To "
        "which part, and to which of add()'s two tensors, was it added?");
    CHECK(one.sent[round].first >= 10);
  }
  {
    HINT("the sum, not the mean");
    CHECK(std::ranges::count(one.x.to_host(), 10) == 2);
    CHECK(one.sent[2].first == std::round(one.sent[2].first));
  }
}

TEST_CASE("Two ranks have the sum of both", "[task04.1]") {
  HINT(
      "one rank waits for another that sends nothing: do all ranks make the same number of steps, "
      "and send and receive in one group?");
  const RingResult ring(2, 2);
  {
    HINT(
        "a digit is the number of times that a rank's value was added: once each. If it is none, "
        "or "
        "nonsense: had the part come when it was added? A group's calls are enqueued when the "
        "group "
        "is closed");
    CHECK(ring.found[0] == ring.expected);
  }
  HINT(
      "rank 0 has the sum, rank 1 has not: which part does each begin with? Of which part does a "
      "rank hold the sum after the reduce-scatter, and is that the one it passes on first?");
  CHECK(ring.found[1] == ring.expected);
}

TEST_CASE("Four ranks with parts of different lengths", "[task04.1]") {
  HINT(
      "ranks do not agree on what they exchange: which part goes when, does everything go the same "
      "way round the ring, and is there room for the part that comes, as parts differ in length?");
  const RingResult ring(4, 7);
  for (const Values& found : ring.found) {
    HINT(
        "some part is not complete on some rank: are the parts those of part(), which differ in "
        "length? Of which part does a rank hold the sum after the "
        "reduce-scatter, and is that the one it passes on first?");
    CHECK(found == ring.expected);
  }
}

TEST_CASE("Fewer numbers than ranks", "[task04.1]") {
  HINT("some parts are empty: do all ranks make all rounds, and hand on what came?");
  const RingResult ring(4, 2);
  for (const Values& found : ring.found) CHECK(found == ring.expected);
}

TEST_CASE("Parts that no buffer of a connection holds", "[task04.1]") {
  HINT(
      "all ranks wait until what they send is taken, and nobody takes it: what makes a send and a "
      "receive go on at the same time?");
  const RingResult ring(2, 4'000'000);
  const bool equal = ring.found[0] == ring.expected && ring.found[1] == ring.expected;
  HINT("the sum of a large tensor is another one");
  CHECK(equal);
}

TEST_CASE("A rank sends 2 (W-1)/W of the numbers", "[task04.1]") {
  HINT("a rank sends one part in each step: does it send more, or make more steps than needed?");
  const RingResult ring(3, 6);
  const int64_t expected = 2 * 2 * 2 * int64_t{sizeof(Real)};
  for (const int64_t sent : ring.bytes_sent) CHECK(sent == expected);
}

}  // namespace
}  // namespace lockstep
