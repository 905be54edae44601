// Grades stage 06.

#include <fmt/ranges.h>

#include <array>
#include <cmath>

#include "06-fully-sharded/fully_sharded.h"
#include "06-fully-sharded/shard_plan.h"
#include "06-fully-sharded/sharded_step.h"
#include "common/nn/layers.h"
#include "tests/coursework/hint.h"
#include "tests/coursework/other_rank.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tcp_stores.h"

namespace lockstep {
namespace {

using testing::OtherRank;
using Values = std::vector<Real>;

constexpr double kPatience = 3;               // seconds until a rank gives up waiting for another
constexpr int64_t kLine = 64 / sizeof(Real);  // numbers of 64 bytes

// --- Shards --------------------------------------------------------------------------------------

TEST_CASE("Shards are equally long, and the padding makes them so", "[task06.1]") {
  {
    HINT("numbers that divide well need no padding");
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
  }
  HINT("one rank has everything, and pads for the 64 bytes only");
  CHECK(padded_length(kLine + 1, 1) == 2 * kLine);
}

TEST_CASE("A rank's shard follows that of the rank before", "[task06.1]") {
  HINT("all shards together are the whole buffer, once: where does each begin, how long is it?");
  CHECK(shard_of(96, 0, 3) == FlatRange{0, 32});
  CHECK(shard_of(96, 1, 3) == FlatRange{32, 32});
  CHECK(shard_of(96, 2, 3) == FlatRange{64, 32});
}

/// "0: 2 at 5 -> 7": elements [5, 7) of parameter 0 begin at number 7 of the shard.
std::string told(const std::vector<Piece>& pieces) {
  std::vector<std::string> texts;
  for (const Piece& piece : pieces) {
    texts.push_back(fmt::format("{}: {} at {} -> {}", piece.parameter, piece.of_parameter.count,
                                piece.of_parameter.first, piece.in_shard));
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

TEST_CASE("Pieces of the parameters that lie in a shard", "[task06.1]") {
  // Three parameters; padding behind the first two. A text says: elements of the parameter, from
  // which one on -> where in the shard.
  const std::vector<FlatRange> parameters{{0, 10}, {16, 40}, {64, 5}};
  {
    HINT("a parameter that lies in the shard as a whole is one piece");
    CHECK(told(pieces_in(parameters, {0, 16})) == "0: 10 at 0 -> 0");
  }
  {
    HINT("where a piece begins is counted from the beginning of the shard, not of the buffer");
    CHECK(told(pieces_in(parameters, {56, 24})) == "2: 5 at 0 -> 8");
  }
  {
    HINT("a parameter may end on the next rank: how much of it is here?");
    CHECK(told(pieces_in(parameters, {0, 48})) == "0: 10 at 0 -> 0, 1: 32 at 0 -> 16");
  }
  {
    HINT("and it may have begun on the rank before: which of its elements are here?");
    CHECK(told(pieces_in(parameters, {48, 48})) == "1: 8 at 32 -> 0, 2: 5 at 0 -> 16");
  }
  HINT("a parameter may begin before the shard and end behind it");
  CHECK(told(pieces_in(parameters, {20, 4})) == "1: 4 at 4 -> 0");
}

TEST_CASE("What does not touch the shard has no piece", "[task06.1]") {
  const std::vector<FlatRange> parameters{{0, 16}, {16, 0}, {16, 20}};
  HINT("a piece without elements: a parameter that ends where the shard begins is not in it");
  CHECK(told(pieces_in(parameters, {16, 16})) == "2: 16 at 0 -> 0");
  CHECK(told(pieces_in(parameters, {0, 16})) == "0: 16 at 0 -> 0");
  HINT("padding belongs to no parameter");
  CHECK(told(pieces_in(parameters, {36, 12})).empty());
}

// --- The step ------------------------------------------------------------------------------------

/// A rank that knows the two halves of an all-reduce, and counts what it sends.
class Halves final : public Communicator {
 public:
  explicit Halves(Communicator& rank) : Communicator(rank.rank(), rank.world_size()), rank_(rank) {}
  int64_t sent = 0;  // numbers

 private:
  void issue(Stream stream, const Call& call) override {
    sent += call.mine.count * (world_size() - 1);
    if (call.op == Call::Op::all_gather) return rank_.all_gather(stream, call.mine, call.all);
    require(call.op == Call::Op::reduce_scatter,
            "{}: expected a reduce_scatter and an all_gather; an all-reduce is both, and leaves "
            "nothing to do in between",
            call.text());
    rank_.reduce_scatter(stream, call.all, call.mine, call.reduction);
  }
  Communicator& rank_;
};

/// Two ranks with two values each make steps, with learning rate 1.
struct TwoRanks {
  explicit TwoRanks(const OptimizerRule& rule = {}) {
    for (size_t rank = 0; rank < 2; ++rank) {
      const Stream stream = ranks.streams[rank];
      halves.push_back(std::make_unique<Halves>(*ranks.processes[rank]));
      whole.push_back({Tensor::from_host(stream, {4}, {100, 200, 300, 400}),
                       Tensor::from_host(stream, {4}, {0, 0, 0, 0})});
      state.push_back(StepStateTensor::from_host(stream, {}, {StepState{.learning_rate = 1}}));
      loss.push_back(Tensor::from_host(stream, {1}, {0}));
      steps.emplace_back(whole[rank], *halves[rank], rule);
    }
  }
  /// One step of both, with these gradients.
  void step(const std::array<Values, 2>& gradients) {
    for (size_t rank = 0; rank < 2; ++rank) whole[rank].gradients.copy_from_host(gradients[rank]);
    for (size_t rank = 0; rank < 2; ++rank) steps[rank](state[rank], loss[rank]);
  }
  Values values(size_t rank) const { return whole[rank].values.to_host(); }
  /// The part of them that this rank does not update.
  Values others(size_t rank) const {
    const Values all = values(rank);
    return rank == 0 ? Values{all[2], all[3]} : Values{all[0], all[1]};
  }

  testing::Ranks ranks = testing::tcp_ranks(2, kPatience);
  std::vector<std::unique_ptr<Halves>> halves;
  std::vector<UpdatedRange> whole;
  std::vector<StepStateTensor> state;
  std::vector<Tensor> loss;
  std::vector<ShardedStep> steps;
};

const std::array<Values, 2> kGradients{Values{1, 2, 3, 4}, Values{3, 4, 5, 6}};

TEST_CASE("After a step all ranks have the values of one process", "[task06.2]") {
  TwoRanks two;
  HINT("a rank waits for another: do both make the same calls, in the same order?");
  two.step(kGradients);
  {
    HINT("rank 0's own shard did not move: is the optimizer's step there?");
    CHECK(two.values(0)[0] != 100);
  }
  {
    HINT(
        "rank 0's own gradient alone moved its shard: the others' belong to it, before the update");
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

/// A layer with one parameter.
class OneParameter final : public Module {
 public:
  explicit OneParameter(int64_t elements) {
    add_parameter("weight", ParameterKind::bias, {elements}, 1);
  }
  Tensor forward(const Tensor& x, Context&) override { return x; }
  Tensor backward(const Tensor& dy, Context&) override { return dy; }
};

Layers one_layer(int64_t elements) {
  Layers layers;
  Sequential network;
  network.add("layer", std::make_unique<OneParameter>(elements));
  return network.release_layers();
}

/// A unit on rank 0 of two. The parameter's last numbers are on the other rank, where all are 10.
struct OneUnit {
  explicit OneUnit(ShardKind kind = ShardKind::parameters)
      : messages{kind, other, device.stream, communication}, unit(one_layer(kLine + 2), messages) {
    unit.value_shard().copy_from_host(Values(size_t(kLine), 1));
    communication.synchronize();
    unit.shard_was_updated();
  }
  ~OneUnit() {
    gate.open();
    for (const Stream& stream : {device.stream, communication}) {
      try {
        stream.synchronize();
      } catch (const Error&) {  // the test reports it
      }
    }
  }
  /// The parameter's numbers, in the order of the passes: the first, and the last.
  std::array<Real, 2> ends() const {
    const Parameter& p = *unit.in_order().front();
    if (!p.value.defined()) return {-1, -1};
    const Values values = p.value.to_host();
    return {values.front(), values.back()};
  }

  testing::Gate gate{2};
  std::atomic<int> seen = -1;  // by the passes
  OtherRank other{10};
  testing::TestDevice device;
  Stream communication = device.device->create_stream("communication");
  UnitMessages messages;
  Unit unit;
};

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
  HINT("messages of all units go over the stream of the communication, in one order");
  REQUIRE(rank.other.gathers.size() == 1);
  CHECK(rank.other.gathers[0].stream.backend().name() == "communication");
  HINT("the message is counted, with the bytes that this rank sends: bytes_of_half()");
  CHECK(rank.messages.bytes_sent == int64_t(kLine * sizeof(Real)));
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

TEST_CASE("The gather waits for what the passes have enqueued", "[task06.3]") {
  OneUnit rank;
  testing::enqueue(rank.device.stream, [&] { rank.gate.pass(); });
  rank.device.kernels().fill(rank.device.stream, 5, rank.unit.value_shard());  // the update
  {
    HINT("does the host wait for the device? It has to go on and enqueue");
    rank.unit.gather();
  }
  HINT(
      "the shard was sent before the device had updated it, into memory that kernels before may "
      "still use: which event does the communication stream wait for?");
  CHECK(rank.other.done_after_a_while(0) == 0);
  rank.gate.open();
  rank.unit.await_values();
  CHECK(rank.ends() == Ends{5, 10});
}

TEST_CASE("The passes wait for the gather when they need the values, and not before",
          "[task06.3]") {
  OneUnit rank;
  std::atomic<bool> went_on = false;
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
  HINT("a layer computed before the values were there: which event, recorded where, comes first?");
  CHECK(rank.seen == 1);
}

TEST_CASE("A freed unit takes no memory", "[task06.3]") {
  OneUnit rank;
  MemoryCounter& memory = rank.device.device->memory();
  const int64_t before = memory.current();
  rank.unit.gather();
  rank.unit.await_values();
  rank.unit.free_values();
  {
    HINT("the views that layers look into hold the memory, too");
    CHECK_FALSE(rank.unit.in_order().front()->value.defined());
  }
  {
    HINT("nobody gives the memory back: a rank ends up with the whole network");
    CHECK(memory.current() == before);
  }
  HINT("a unit that is not there may be freed once more");
  rank.unit.free_values();
  CHECK(memory.current() == before);
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
  rank.device.stream.synchronize();
  CHECK(rank.seen == 1);
}

TEST_CASE("Values that a rank keeps are gathered in place and stay", "[task06.3]") {
  OneUnit rank(ShardKind::optimizer);
  const Real* const place = rank.unit.values().data();
  HINT("with ZeRO-1 the whole is always there, and what the others updated comes into it");
  rank.unit.gather();
  rank.unit.await_values();
  rank.unit.free_values();
  REQUIRE(rank.unit.in_order().front()->value.defined());
  CHECK(rank.unit.values().data() == place);
  CHECK(rank.ends() == Ends{1, 10});
}

// --- The norm ------------------------------------------------------------------------------------

/// Rank 0 of two, whose other rank has squares of 10.
struct Norm {
  explicit Norm(ShardKind kind = ShardKind::parameters)
      : sharded(network(), device.stream, other,
                [](const std::string& mine) { return std::vector<std::string>(2, mine); },
                communication, {.kind = kind}) {
    device.stream.synchronize();
  }
  ~Norm() {
    gate.open();
    for (const Stream& stream : {device.stream, communication}) {
      try {
        stream.synchronize();
      } catch (const Error&) {  // the test reports it
      }
    }
  }
  static std::unique_ptr<Module> network() {
    auto network = std::make_unique<Sequential>();
    network->add("layer", std::make_unique<OneParameter>(4));
    return network;
  }

  testing::Gate gate{2};
  OtherRank other{10};
  testing::TestDevice device;
  Stream communication = device.device->create_stream("communication");
  FullyShardedDataParallel sharded;
  Tensor squares = device.put({1}, {4});
};

TEST_CASE("The squares of all shards are added up", "[task06.4]") {
  for (const ShardKind kind : {ShardKind::optimizer, ShardKind::gradients, ShardKind::parameters}) {
    Norm rank(kind);
    {
      HINT("does the host wait for something? It has to go on and enqueue");
      rank.sharded.sum_over_shards(rank.squares);
    }
    rank.communication.synchronize();
    {
      HINT("this is the square of one shard's norm: each rank would clip by another factor");
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

}  // namespace
}  // namespace lockstep
