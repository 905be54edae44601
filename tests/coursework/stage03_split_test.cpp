// Grades stage 03: what lies between the parts of a split model (03.3, 03.4).

#include "03-model-split/pipeline/channel.h"
#include "03-model-split/tensor/row_and_column.h"
#include "tests/coursework/hint.h"
#include "tests/coursework/late.h"
#include "tests/coursework/other_rank.h"
#include "tests/support/nn_test_support.h"

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

/// RowLinear with two inputs and one output, on one of two ranks: it has the first input and that
/// one's weight. The other rank's product is known.
struct HalfOfLayer {
  HalfOfLayer(Real weight, Real others_product, Real bias, Activation activation = Activation::none,
              int me = 0)
      : other(others_product, 2, me), activation(activation) {
    for (const Parameter* p : split.parameters()) {
      p->value.copy_from_host({p->kind == ParameterKind::bias ? bias : weight});
    }
    other.sums.reserve(8);  // the device reads it while the host goes on
    other.before_sum = [this] { given = *static_cast<const Real*>(other.sums[0].x.data); };
  }
  ~HalfOfLayer() {
    gate.open();
    for (const Stream& stream : {device.stream, communication}) {
      try {
        stream.synchronize();
      } catch (const Error&) {  // the test reports it
      }
    }
  }
  static Linear& named(Linear& linear) {
    linear.set_name("fc1");
    return linear;
  }
  Tensor put(Real x = 1) const { return device.put({1, 1}, {x}); }
  /// The output for an input of 1.
  Real forward() { return split.forward(put(), context).to_host().at(0); }

  testing::Gate gate{2};
  testing::OtherRank other;
  Real given = 0;  // what this rank gave to the sum
  testing::TestDevice device;
  Stream communication = device.device->create_stream("communication");
  SplitRanks ranks{other, communication};
  Activation activation;
  Linear whole{2, 1, activation};
  RowLinear split{named(whole), ranks};
  FlatParameters parameters{split, device.stream};
  Context context{device.stream};
};

TEST_CASE("Every rank has the output of the whole layer", "[task03.4]") {
  HINT("the output is needed on every rank: which collective is it?");
  const Real sum = HalfOfLayer(2, 20, 0).forward();
  {
    HINT("21 * 3: inputs were added up before the product. What does the all-reduce add up?");
    CHECK(HalfOfLayer(3, 20, 0).forward() != 63);
  }
  {
    HINT("2 + 20 + 20: is it reduced once more than needed?");
    CHECK(sum != 42);
  }
  {
    HINT("the sum, not the mean, of the ranks' products");
    CHECK(sum != 11);
  }
  HINT("a rank's product knows only its own inputs: the output is the sum over all ranks");
  CHECK(sum == 22);
}

TEST_CASE("Every rank has the bias, once", "[task03.4]") {
  for (const int me : {0, 1}) {
    HalfOfLayer rank(2, 20, 300, Activation::none, me);
    const Real biased = rank.forward();
    {
      HINT("the bias is missing in some rank's output: every rank adds it to the sum that it has");
      CHECK(biased != 22);
    }
    {
      HINT(
          "all ranks have the whole bias: how many times is it in the sum? Nothing is reduced "
          "after it");
      CHECK(rank.given == 2);
    }
    HINT("2 + 20, and a bias of 300");
    CHECK(biased == 322);
  }
}

TEST_CASE("The activation is that of the sum", "[task03.4]") {
  HINT("the sum of ReLUs is not the ReLU of the sum: -5 + 3 + 4 is 2");
  CHECK(HalfOfLayer(-5, 3, 4, Activation::relu).forward() == 2);
  HINT("-5 + 3 + 1 is less than 0, and then the output is cut off");
  CHECK(HalfOfLayer(-5, 3, 1, Activation::relu).forward() == 0);
}

TEST_CASE("One sum a pass, in the order of all calls", "[task03.4]") {
  HalfOfLayer rank(2, 20, 300);
  const Tensor x = rank.put();
  testing::enqueue(rank.device.stream, [&] { rank.gate.pass(); });
  {
    HINT("does the host wait for a device? It has to go on and enqueue");
    rank.split.forward(x, rank.context);
  }
  rank.gate.open();
  {
    HINT("the ranks exchange one sum; everything else each does by itself");
    REQUIRE(rank.other.sums.size() == 1);
    CHECK(rank.other.sums[0].x.count == 1);
  }
  HINT(
      "calls on two streams race for the communicator, and ranks can come to wait for each other "
      "crosswise: SplitRanks knows the stream");
  CHECK(rank.other.sums[0].stream.backend().name() == "communication");
}

TEST_CASE("What backward needs is kept", "[task03.4]") {
  HalfOfLayer cut_off(3, -5, 1, Activation::relu);
  cut_off.forward();
  HINT("the layer remembers the tensor that product() returned: is the output in that one?");
  CHECK(cut_off.split.backward(cut_off.put(), cut_off.context).to_host() == Values{0});
}

}  // namespace
}  // namespace lockstep
