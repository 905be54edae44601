// Grades stage 03: what lies between the parts of a split model (03.3, 03.4).

#include "03-model-split/pipeline/channel.h"
#include "03-model-split/tensor/row_and_column.h"
#include "tests/coursework/hint.h"
#include "tests/coursework/late.h"

namespace lockstep {
namespace {

using Values = std::vector<Real>;

// --- From stage to stage -------------------------------------------------------------------------

/// The sender is device 0, the receiver device 1. Tensors have two equal numbers.
struct Boundary {
  explicit Boundary(size_t places) : channel(devices.stream(0), devices.stream(1), places) {}

  Tensor put(size_t device, Real value) const {
    return Tensor::from_host(devices.stream(device), {1, 2}, {value, value});
  }
  /// What the receiver reads, in its order.
  void read(const Tensor& received, const Tensor& seen) const {
    devices.stream(1).copy(seen.data(), received.data(), seen.bytes());
  }
  /// A tensor is sent, received and released.
  Values carry(Real value) {
    const Tensor x = put(0, value);
    channel.send(x);
    const Values values = channel.receive().to_host();
    channel.release();
    return values;
  }

  testing::LateMachine devices{2};
  Channel channel;
};

// Here the sender's device has done its work before the receiver looks: events play no part yet.
TEST_CASE("What was sent arrives, all of it", "[task03.3]") {
  Boundary boundary(1);
  const Tensor x = boundary.put(0, 1), next = boundary.put(0, 2);
  {
    HINT("the sender's tensor was overwritten: copy() is told first where to, then from where");
    boundary.channel.send(x);
    CHECK(x.to_host() == Values{1, 1});
  }
  HINT("has every send an event, which receive() makes the receiver wait for?");
  const Tensor place = boundary.channel.receive();
  {
    HINT("the receiver has the sender's tensor itself, not a copy in memory of its own device");
    CHECK(place.home().device().name() == "cpu:1");
  }
  place.copy_from_host({-1, -1});
  boundary.channel.release();
  boundary.channel.send(next);
  boundary.devices.stream(0).synchronize();
  const Tensor again = boundary.channel.receive();
  {
    HINT("a place keeps its memory: is new memory taken, instead of waiting until it is empty?");
    CHECK(again.data() == place.data());
  }
  {
    HINT("only a part of the tensor has come: copy() counts bytes, not numbers");
    CHECK(again.to_host()[1] == 2);
  }
  HINT("does every send copy its tensor into the place?");
  CHECK(again.to_host() == Values{2, 2});
}

TEST_CASE("What was sent arrives, one after another", "[task03.3]") {
  Boundary boundary(2);
  HINT(
      "the receiver read a place that was not filled yet: does every send copy, and has it an "
      "event of its own to wait for?");
  for (const Real value : {1, 2, 3, 4, 5}) CHECK(boundary.carry(value) == Values{value, value});
}

TEST_CASE("The receiver waits for a late sender", "[task03.3]") {
  Boundary boundary(1);
  const Tensor x = boundary.put(0, 1), seen = boundary.put(1, -1);
  for (const bool late : {false, true}) {
    if (late) boundary.devices.hold(0);
    x.home().kernels().fill(x.home(), late ? 2 : 1, x);
    {
      HINT("does the host wait for a device? It has to go on and enqueue");
      boundary.channel.send(x);
      boundary.read(boundary.channel.receive(), seen);
      boundary.channel.release();
    }
    if (late) boundary.devices.let_go_after(1);
    HINT(
        "the receiver read a place that was not filled yet: which event does it wait for, and of "
        "which stream?");
    CHECK(seen.to_host() == (late ? Values{2, 2} : Values{1, 1}));
  }
}

TEST_CASE("A place is not filled while a late receiver still reads it", "[task03.3]") {
  for (const size_t places : {1u, 3u}) {
    Boundary boundary(places);
    for (size_t i = 0; i < places; ++i) boundary.carry(1);  // the places are there
    const Tensor seen = boundary.put(1, -1), x = boundary.put(0, 2), next = boundary.put(0, 3);
    for (size_t i = 0; i < places; ++i) boundary.channel.send(x);
    const Tensor received = boundary.channel.receive();
    boundary.devices.hold(1);
    boundary.read(received, seen);
    boundary.channel.release();
    {
      HINT("does the host wait for a device? It has to go on and enqueue");
      boundary.channel.send(next);
    }
    boundary.devices.let_go_after(0);
    HINT(
        "the place was filled again before the receiver had read it: when is it empty, and who "
        "waits for that? For the event of which place?");
    CHECK(seen.to_host() == Values{2, 2});
    for (size_t i = 1; i < places; ++i) boundary.channel.receive();
    CHECK(boundary.channel.receive().to_host() == Values{3, 3});
  }
}

TEST_CASE("The sender does not wait for a receiver that is busy", "[task03.3]") {
  Boundary boundary(1);
  boundary.carry(1);
  const Tensor x = boundary.put(0, 2);
  boundary.devices.hold(1);
  {
    HINT("does the host wait for a device? It has to go on and enqueue");
    boundary.channel.send(x);
  }
  x.home().kernels().fill(x.home(), 9, x);
  const Event gone_on = x.home().record();
  {
    HINT("the place was empty, but the sender waits until the receiver has done something else");
    CHECK(boundary.devices.comes(gone_on));
  }
  boundary.devices.let_go();
  HINT("the sender went on and changed its tensor: whose stream makes the copy, and when?");
  CHECK(boundary.channel.receive().to_host() == Values{2, 2});
}

TEST_CASE("The receiver is free until it receives", "[task03.3]") {
  Boundary boundary(1);
  boundary.carry(1);
  const Tensor x = boundary.put(0, 2);
  boundary.devices.hold(0);
  {
    HINT("does the host wait for a device? It has to go on and enqueue");
    boundary.channel.send(x);
  }
  const bool free = boundary.devices.comes(boundary.devices.stream(1).record());
  boundary.devices.let_go();
  boundary.devices.stream(1).synchronize();
  HINT(
      "the receiver waits for a tensor that it has not asked for: send() only notes the event, and "
      "receive() makes the receiver wait");
  CHECK(free);
}

TEST_CASE("A new place is there in the receiver's order", "[task03.3]") {
  Boundary boundary(1);
  const Tensor x = boundary.put(0, 1);
  boundary.devices.hold(1);
  boundary.channel.send(x);
  const Event copied = x.home().record();
  HINT(
      "a place's memory is there when the receiver has done what it was given before: does the "
      "first send wait, too?");
  CHECK_FALSE(boundary.devices.comes(copied, testing::kShort));
  boundary.devices.let_go();
  boundary.devices.stream(1).synchronize();
}

TEST_CASE("The last micro-batch may be smaller", "[task03.3]") {
  Boundary boundary(1);
  const Stream from = boundary.devices.stream(0);
  boundary.channel.send(Tensor::from_host(from, {2, 2}, {1, 2, 3, 4}));
  const Tensor place = boundary.channel.receive();
  boundary.channel.release();
  const Tensor all = Tensor::from_host(from, {2, 2}, {5, 6, 7, 8});
  boundary.channel.send(all.rows(0, 1));
  HINT("how many bytes are sent: those of the place, or those of the tensor?");
  CHECK(boundary.channel.receive().to_host() == Values{5, 6});
  CHECK(place.to_host() == Values{5, 6, 3, 4});
}

// --- Layers --------------------------------------------------------------------------------------

/// RowLinear with two inputs and one output on two ranks: rank 0 has the first weight, rank 1 the
/// second.
struct TwoHalves {
  TwoHalves(const Values& weights, Real bias, Activation activation = Activation::none)
      : whole(make_whole(activation)), modules(*machine.world), split(*whole, modules) {
    for (int r = 0; r < 2; ++r) {
      parameters.push_back(
          std::make_unique<FlatParameters>(modules.tree(r), machine.streams[size_t(r)]));
      const std::vector<Parameter*>& rank = parameters.back()->parameters();
      rank[0]->value.copy_from_host({weights[size_t(r)]});
      rank[1]->value.copy_from_host({bias});
      owned.push_back(std::make_unique<Context>(machine.streams[size_t(r)]));
      contexts.push_back(owned.back().get());
    }
  }
  static std::unique_ptr<Linear> make_whole(Activation activation) {
    auto linear = std::make_unique<Linear>(2, 1, activation);
    linear->set_name("fc1");
    return linear;
  }
  /// One number on each rank.
  Tensors put(const Values& values) const {
    return {Tensor::from_host(machine.streams[0], {1, 1}, {values[0]}),
            Tensor::from_host(machine.streams[1], {1, 1}, {values[1]})};
  }
  static Values numbers(const Tensors& of_ranks) {
    Values values;
    for (const Tensor& x : of_ranks) values.push_back(x.to_host().at(0));
    return values;
  }
  /// What the ranks have for these inputs.
  Values forward(const Values& x = {1, 1}) { return numbers(split.forward(put(x), contexts)); }

  testing::LateMachine devices{2};
  testing::Machine& machine = devices.machine;
  std::unique_ptr<Linear> whole;
  RankModules modules;
  RowLinear split;
  std::vector<std::unique_ptr<FlatParameters>> parameters;
  std::vector<std::unique_ptr<Context>> owned;
  Contexts contexts;
};

TEST_CASE("Every rank has the output of the whole layer", "[task03.4]") {
  {
    TwoHalves halves({1, 20}, 0);
    HINT("every rank has its own part of the inputs: may another use it?");
    const Tensors y = halves.split.forward(halves.put({1, 1}), halves.contexts);
    TwoHalves::numbers(y);  // nothing is under way then
    HINT("a rank's output is on its own device: is one rank's given to all?");
    CHECK(y[0].home().device().name() == "cpu:0");
    CHECK(y[1].home().device().name() == "cpu:1");
  }
  const Values sums = TwoHalves({1, 20}, 0).forward();
  {
    HINT("1 + 20 is half of that, and of the sum again: is it reduced once more than needed?");
    CHECK(sums[0] != 42);
  }
  {
    HINT("the sum, not the mean, of the ranks' products");
    CHECK(sums[0] != Real(10.5));
  }
  {
    HINT("1 * 2: inputs were added up before the product. What does the all-reduce add up?");
    CHECK(sums[0] != 2);
  }
  {
    HINT(
        "a rank's product knows only its own inputs: the output is the sum over all ranks. Was the "
        "other's product there when it was added, and who waits for whom?");
    CHECK(sums == Values{21, 21});
  }
  {
    HINT("1 * 4 + 20 * 3: a rank multiplies its weights with its own inputs");
    CHECK(TwoHalves({1, 20}, 0).forward({4, 3}) == Values{64, 64});
  }
}

TEST_CASE("Every rank has the bias, once", "[task03.4]") {
  const Values biased = TwoHalves({1, 20}, 300).forward();
  {
    HINT("the bias is missing in some rank's output: every rank adds it to the sum that it has");
    CHECK(biased[0] != 21);
    CHECK(biased[1] != 21);
  }
  HINT(
      "all ranks have the whole bias: how many times is it in the sum? Nothing is reduced after "
      "it");
  CHECK(biased == Values{321, 321});
}

TEST_CASE("The activation is that of the sum", "[task03.4]") {
  HINT("the sum of ReLUs is not the ReLU of the sum: -5 + 3 + 4 is 2");
  CHECK(TwoHalves({-5, 3}, 4, Activation::relu).forward() == Values{2, 2});
  HINT("-5 + 3 + 1 is less than 0, and then so is every rank's output cut off");
  CHECK(TwoHalves({-5, 3}, 1, Activation::relu).forward() == Values{0, 0});
}

TEST_CASE("A late rank's product is in the sum", "[task03.4]") {
  for (const size_t late : {0u, 1u}) {
    TwoHalves halves({1, 20}, 0);
    const Tensors x = halves.put({1, 1});
    halves.devices.hold(late);
    {
      HINT("does the host wait for a device? It has to go on and enqueue");
      const Tensors y = halves.split.forward(x, halves.contexts);
      halves.devices.let_go_after(1 - late);
      HINT(
          "a rank's product was not there yet when it was added up, and who waits for whom? The "
          "ranks' calls do");
      CHECK(TwoHalves::numbers(y) == Values{21, 21});
    }
  }
}

TEST_CASE("What backward needs is kept", "[task03.4]") {
  TwoHalves cut_off({-5, 3}, 1, Activation::relu);
  cut_off.forward();
  HINT("a shard remembers the tensor that its last product() returned: is the output in that one?");
  CHECK(cut_off.numbers(cut_off.split.backward(cut_off.put({1, 1}), cut_off.contexts)) ==
        Values{0, 0});
}

TEST_CASE("One all-reduce a pass", "[task03.4]") {
  TwoHalves halves({1, 20}, 300);
  halves.forward();
  HINT("the ranks exchange one sum; everything else each does by itself");
  CHECK(halves.split.traffic().all_reduces == 1);
  CHECK(halves.split.traffic().bytes == int64_t{sizeof(Real)});
}

}  // namespace
}  // namespace lockstep
