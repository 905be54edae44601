// Replicas on several devices: their order, failures, and what they cost.

#include "02-dataparallel/data_parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <type_traits>

#include "common/core/error.h"
#include "common/data/batch_parts.h"
#include "common/nn/batch_norm.h"
#include "common/nn/models.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/machine.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tasks.h"
#include "tests/unit/02/data_parallel_runs.h"

namespace lockstep {
namespace {

using namespace testing::data_parallel;
using Catch::Matchers::ContainsSubstring;
using std::chrono::milliseconds;
using testing::Clock;
using testing::cpus;
using testing::enqueue;
using testing::Machine;
using testing::message_of;
using testing::ScopedEnvironment;
using Values = std::vector<Real>;
using Names = std::vector<std::string>;
using MakeModule = std::function<std::unique_ptr<Module>()>;

// --- Order between the devices -------------------------------------------------------------------

/// Passes everything on when all replicas have come to this point. If they do not come at the same
/// time, it continues after a while: the trace shows it.
class Meeting final : public Module {
 public:
  struct Place {
    std::atomic<int> forward{0}, backward{0};
    int replicas;
  };
  explicit Meeting(Place& place) : place_(place) {}
  AnyTensor forward(const AnyTensor& x, Context& context) override {
    meet(context.stream(), "meet forward", place_.forward);
    return x;
  }
  AnyTensor backward(const AnyTensor& dy, Context& context) override {
    meet(context.stream(), "meet backward", place_.backward);
    return dy;
  }

 private:
  void meet(Stream stream, const char* op, std::atomic<int>& arrived) const {
    enqueue(stream, op, [&arrived, all = place_.replicas] {
      const auto begin = Clock::now();
      arrived.fetch_add(1);
      while (arrived.load() < all && Clock::now() - begin < std::chrono::seconds(10)) {
        std::this_thread::sleep_for(milliseconds(1));
      }
      std::this_thread::sleep_for(milliseconds(2));  // seen by all before anyone goes
    });
  }
  Place& place_;
};

TEST_CASE("All devices are busy at the same time, forward and backward", "[dataparallel][tsan]") {
  Meeting::Place place{.replicas = 3};
  Network network([&] { return std::make_unique<Meeting>(place); }, cpus(3), kWrapped,
                  {.trace = true});
  const Tensor y = network.network->forward(network.put(Batch(6, 1, {4})), network.context);
  network.network->backward(y, network.context);
  for (const Stream& stream : network.machine.streams) stream.synchronize();
  for (const std::string op : {"meet forward", "meet backward"}) {
    INFO(op);
    int64_t last_begin = 0, first_end = std::numeric_limits<int64_t>::max();
    for (const size_t device : {0, 1, 2}) {
      const std::vector<Span> spans = network.machine.spans(device, op);
      REQUIRE(spans.size() == 1);
      last_begin = std::max(last_begin, spans[0].begin_ns);
      first_end = std::min(first_end, spans[0].end_ns);
    }
    CHECK(last_begin < first_end);
  }
}

TEST_CASE("The result does not depend on which device is late", "[dataparallel][tsan]") {
  const std::vector<Batch> both{Batch(5, 1), Batch(5, 2)};
  /// Scores and gradients of two passes, where one device (-1: none) sleeps before each half.
  const auto passes = [&](int late) {
    Network network(model(ModelKind::seed_bn, true), cpus(3), kWrapped);
    const auto delay = [&] {
      if (late < 0) return;
      enqueue(network.machine.streams[late], "sleep",
              [] { std::this_thread::sleep_for(milliseconds(15)); });
    };
    const Tensor scores_gradient = network.put(Batch(5, 3, {10}));
    network.set({.loss_weight = 1});
    network.optimizer.zero_gradients();
    std::vector<Tensor> scores;
    for (const Batch& batch : both) {
      const Tensor images = network.put(batch);
      delay();
      scores.push_back(network.network->forward(images, network.context));
      delay();
      network.network->backward(scores_gradient, network.context);
    }
    Values all = network.parameters.gradients().to_host();
    for (const Tensor& y : scores) {
      const Values values = y.to_host();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  };
  const Values expected = passes(-1);
  for (const int late : {0, 1, 2}) {
    INFO("cpu:" << late << " is late");
    CHECK((passes(late) == expected));
  }
  const ScopedEnvironment chaos("LOCKSTEP_CHAOS", "200");
  CHECK((passes(-1) == expected));
}

// --- Failures ------------------------------------------------------------------------------------

TEST_CASE("An error of one replica names it and its device, and the others finish",
          "[dataparallel][row39]") {
  const MakeModule norm = [] {
    auto network = std::make_unique<Sequential>();
    network->add("bn", std::make_unique<BatchNorm2d>(4));
    network->set_name("");
    return network;
  };
  Network network(norm, cpus(4), kWrapped);
  const Tensor x = network.put(Batch(5, 1, {1, 1, 4}));  // 2, 2, 1 samples of one value
  const std::string text =
      message_of<BadInput>([&] { network.network->forward(x, network.context); });
  CHECK_THAT(text, ContainsSubstring("replica 2 on cpu:2: bn: one value per channel"));
  CHECK(text.find('\n') == text.npos);
  for (const Stream& stream : network.machine.streams) CHECK_NOTHROW(stream.synchronize());
  // They can go on.
  const Batch good(8, 1, {1, 1, 4});
  CHECK(network.network->forward(network.put(good), network.context).to_host().size() == 32);
}

TEST_CASE("An error keeps its kind when the replica is named", "[dataparallel][row39]") {
  const auto text_within = [](const auto& kind) {
    using Kind = std::decay_t<decltype(kind)>;
    return message_of<Kind>([&] { within("replica 1 on cpu:1", [&] { throw kind; }); });
  };
  CHECK(text_within(BadInput("a")) == "replica 1 on cpu:1: a");
  CHECK(text_within(EnvironmentError("a")) == "replica 1 on cpu:1: a");
  CHECK(text_within(NonFinite("a")) == "replica 1 on cpu:1: a");
  CHECK(text_within(DeviceError("a")) == "replica 1 on cpu:1: a");
  CHECK(text_within(PeerLost("a")) == "replica 1 on cpu:1: a");
}

/// Passes everything on; on cpu:2 a task fails on the way, long after the host has continued.
class Faulty final : public Module {
 public:
  explicit Faulty(bool forward) : forward_(forward) {}
  AnyTensor forward(const AnyTensor& x, Context& context) override {
    if (forward_) fault(context.stream());
    return x;
  }
  AnyTensor backward(const AnyTensor& dy, Context& context) override {
    if (!forward_) fault(context.stream());
    return dy;
  }

 private:
  static void fault(Stream stream) {
    if (stream.device().id().index != 2) return;
    enqueue(stream, "fault", [] {
      std::this_thread::sleep_for(milliseconds(20));
      throw std::runtime_error("planted fault");
    });
  }
  bool forward_;
};

TEST_CASE("A failure on one device reaches device 0, and nobody hangs",
          "[dataparallel][tsan][row39]") {
  for (const bool in_forward : {true, false}) {
    INFO("in forward " << in_forward);
    const auto begin = Clock::now();
    {
      Network network([&] { return std::make_unique<Faulty>(in_forward); }, cpus(4), kWrapped);
      const std::string text = message_of<PeerLost>([&] {
        for (int step = 0; step < 2; ++step) {
          const Tensor x = network.put(Batch(8, 1, {4}));
          network.network->backward(network.network->forward(x, network.context), network.context);
        }
        network.stream().synchronize();
      });
      CHECK_THAT(text, ContainsSubstring("cpu:2"));
      CHECK_THAT(text, ContainsSubstring("planted fault"));
      CHECK(text.find('\n') == text.npos);
      CHECK_THROWS_WITH(network.machine.streams[2].synchronize(), "planted fault");
      for (const size_t other : {1, 3}) network.machine.streams[other].record();
    }  // all streams are drained here
    CHECK(Clock::now() - begin < std::chrono::seconds(20));
  }
}

TEST_CASE("Parameters that lie on another device than the first are refused",
          "[dataparallel][row41]") {
  const Machine machine(cpus(2));
  std::unique_ptr<Module> network = model(ModelKind::seed)();
  const FlatParameters parameters(*network, machine.streams[1]);
  const std::string text = message_of<BadInput>([&] {
    DataParallel(std::move(network), parameters, model(ModelKind::seed), machine.streams);
  });
  CHECK_THAT(text, ContainsSubstring("cpu:1"));
  CHECK_THAT(text, ContainsSubstring("cpu:0"));
  CHECK(text.find('\n') == text.npos);
}

// --- What it costs -------------------------------------------------------------------------------

TEST_CASE("As many bytes move as the sizes say", "[dataparallel]") {
  // The seed network on 28x28 pixels and 10 classes: a sample goes out, its scores come back, their
  // gradients go out.
  constexpr int64_t kSample = (28 * 28 + 10 + 10) * kReal;
  struct Case {
    int64_t batch, used, away;  // devices that get samples, samples that are not device 0's
  };
  for (const auto& [batch_size, used, away] :
       {Case{8, 4, 6}, Case{7, 4, 5}, Case{6, 3, 4}, Case{2, 2, 1}, Case{1, 1, 0}}) {
    INFO("batch " << batch_size);
    Network network(model(ModelKind::seed_bn), cpus(4), kWrapped);
    const FlatParameters& p = network.parameters;
    const int64_t model_bytes = kReal * (2 * p.values().elements() + p.buffer_values().elements());
    CHECK(model_bytes > kReal * 2 * 21'900);
    const int64_t expected =
        (used - 1) * (model_bytes + int64_t{sizeof(StepState)}) + away * kSample;
    CHECK(network.parallel->predicted_bytes(batch_size, kSample) == expected);
    network.step(Batch(batch_size));
    CHECK(network.parallel->bytes_moved() == expected);
    network.evaluate(Batch(batch_size));  // not training
    network.step(Batch(batch_size));
    CHECK(network.parallel->bytes_moved() == 2 * expected);
    CHECK(network.parallel->bytes_predicted() == 2 * expected);
  }
}

TEST_CASE("Every phase of the passes is timed, and nothing while evaluating", "[dataparallel]") {
  Network network(model(ModelKind::seed), cpus(2), kWrapped);
  const auto names = [&] {
    Names found;
    for (const auto& [phase, seconds] : network.parallel->phases().totals()) {
      CHECK(seconds > 0);
      found.push_back(phase);
    }
    return found;
  };
  network.evaluate(Batch(4));
  CHECK(names().empty());
  network.step(Batch(4));
  CHECK(names() ==
        Names{"scatter", "replicate", "forward", "gather", "loss", "backward", "reduce"});
  const auto totals = network.parallel->phases().totals();
  network.evaluate(Batch(4));
  CHECK(network.parallel->phases().totals() == totals);
}

TEST_CASE("A long evaluation does not lose the times of the steps before it", "[dataparallel]") {
  Network network(model(ModelKind::seed), cpus(2), kWrapped);
  network.step(Batch(4));
  network.evaluate(Batch(4));
  for (int i = 0; i < 1100; ++i) network.machine.streams[0].record();
  for (const auto& phase : network.parallel->phases().totals()) CHECK(phase.second > 0);
}

TEST_CASE("The phases' times add up to the time of both passes", "[dataparallel]") {
  double best = 0;  // a busy machine may take the device's thread away between two steps' marks
  for (int attempt = 0; attempt < 5 && best < 0.97; ++attempt) {
    Network network(model(ModelKind::seed), cpus(2), kWrapped);
    network.step(Batch(64));
    double sum = 0;
    for (const auto& phase : network.parallel->phases().totals()) sum += phase.second;
    best = std::max(best, sum / network.passes_seconds());
    CHECK(best <= 1);
  }
  CHECK(best >= 0.97);
}

TEST_CASE("Device 0 needs more memory than the others", "[dataparallel]") {
  Network network(model(ModelKind::seed), cpus(3), kWrapped);
  network.step(Batch(12));
  const auto peak = [&](size_t device) { return network.machine.devices[device]->memory().peak(); };
  // The whole batch, all scores, the momentum, and the gradients that it receives.
  CHECK(double(peak(0)) > 1.1 * double(peak(1)));
  CHECK(peak(1) == peak(2));
  CHECK(peak(1) > 2 * 21'840 * kReal);  // weights and gradients
}

}  // namespace
}  // namespace lockstep
