#pragma once
// Ranks that steps, units and norms of stage 06 are graded on.

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "06-fully-sharded/fully_sharded.h"
#include "06-fully-sharded/sharded_step.h"
#include "tests/coursework/other_rank.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tcp_stores.h"

namespace lockstep::testing {

using Values = std::vector<Real>;

constexpr double kPatience = 3;               // seconds until a rank gives up waiting for another
constexpr int64_t kLine = 64 / sizeof(Real);  // numbers of 64 bytes

/// A rank that knows the two halves of an all-reduce, and counts what it sends.
class Halves final : public Communicator {
 public:
  explicit Halves(Communicator& comm) : Communicator(comm.rank(), comm.world_size()), comm_(comm) {}
  int64_t sent = 0;  // numbers

 private:
  void enqueue(Stream stream, const std::vector<Call>& together, FlightCall) override {
    const Call& call = together[0];
    sent += call.mine.count * (world_size() - 1);
    if (call.op == Call::Op::all_gather) return comm_.all_gather(stream, call.mine, call.all);
    require(call.op == Call::Op::reduce_scatter,
            "{}: expected a reduce_scatter and an all_gather; an all-reduce is both, and leaves "
            "nothing to do in between",
            call.text());
    comm_.reduce_scatter(stream, call.all, call.mine, call.reduction);
  }
  Communicator& comm_;
};

/// Two ranks with two values each make steps, with learning rate 1.
struct TwoRanks {
  explicit TwoRanks(const OptimizerRule& rule = {}) {
    for (size_t rank = 0; rank < 2; ++rank) {
      const Stream stream = ranks.streams[rank];
      halves.push_back(std::make_unique<Halves>(*ranks.comms[rank]));
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

  Ranks ranks = tcp_ranks(2, kPatience);
  std::vector<std::unique_ptr<Halves>> halves;
  std::vector<UpdatedRange> whole;
  std::vector<StepStateTensor> state;
  std::vector<Tensor> loss;
  std::vector<ShardedStep> steps;
};

/// Before the things go that a stream's tasks use: opens the gate, and waits for the streams.
inline void let_go(Gate& gate, std::initializer_list<Stream> streams) {
  gate.open();
  for (const Stream& stream : streams) {
    try {
      stream.synchronize();
    } catch (const Error&) {  // the test reports it
    }
  }
}

/// A layer with one parameter.
class OneParameter final : public Module {
 public:
  explicit OneParameter(int64_t elements) {
    add_parameter("weight", ParameterKind::bias, {elements}, 1);
  }
  AnyTensor forward(const AnyTensor& x, Context&) override { return x; }
  AnyTensor backward(const AnyTensor& dy, Context&) override { return dy; }
};

inline Layers one_layer(int64_t elements) {
  Layers layers;
  Sequential network;
  network.add("layer", std::make_unique<OneParameter>(elements));
  return network.release_layers();
}

/// A unit on rank 0 of several. The parameter's last numbers are on the next rank, where all are
/// 10.
struct OneUnit {
  explicit OneUnit(ShardKind kind = ShardKind::parameters, int world_size = 2)
      : other(10, world_size),
        messages{kind, other, device.stream, communication},
        unit(one_layer(kLine + 2), messages) {
    messages.counts = true;  // as in training
    unit.value_shard().copy_from_host(Values(size_t(unit.value_shard().elements()), 1));
    communication.synchronize();
    unit.shard_was_updated();
  }
  ~OneUnit() { let_go(gate, {device.stream, communication}); }
  /// The parameter's numbers, in the order of the passes: the first, and the last.
  std::array<Real, 2> ends() const {
    const Parameter& p = *unit.in_order().front();
    if (!p.value.defined()) return {-1, -1};
    const Values values = p.value.to_host();
    return {values.front(), values.back()};
  }

  Gate gate{2};
  std::atomic<int> seen = -1;  // by the passes
  OtherRank other;
  TestDevice device;
  Stream communication = device.device->create_stream("communication");
  UnitMessages messages;
  Unit unit;
};

/// Rank 0 of two, whose other rank has squares of 10, unless said otherwise.
struct Norm {
  explicit Norm(ShardKind kind = ShardKind::parameters, Real its_squares = 10)
      : other(its_squares),
        sharded(network(), device.stream, other,
                [](const std::string& mine) { return std::vector<std::string>(2, mine); },
                communication, {.kind = kind}) {
    device.stream.synchronize();
  }
  ~Norm() { let_go(gate, {device.stream, communication}); }
  static std::unique_ptr<Module> network() {
    auto network = std::make_unique<Sequential>();
    network->add("layer", std::make_unique<OneParameter>(4));
    return network;
  }

  Gate gate{2};
  OtherRank other;
  TestDevice device;
  Stream communication = device.device->create_stream("communication");
  FullyShardedDataParallel sharded;
  Tensor squares = device.put({1}, {4});
};

}  // namespace lockstep::testing
