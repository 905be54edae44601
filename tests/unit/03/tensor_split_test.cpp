// Networks split inside their layers: the same numbers as in one piece, the traffic that this
// takes, and the state.

#include "03-model-split/tensor/tensor_split.h"

#include <fmt/ranges.h>

#include <set>

#include "common/core/stream_backend.h"
#include "common/nn/layers.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/machine.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tasks.h"
#include "tests/unit/03/tensor_split_runs.h"

namespace lockstep {
namespace {

using namespace testing::tensor_split;
using Catch::Matchers::ContainsSubstring;
using testing::cpus;
using testing::enqueue;
using testing::message_of;
using testing::ScopedEnvironment;
using Values = std::vector<Real>;
using Names = std::vector<std::string>;
using State = std::vector<StateTensor>;

TEST_CASE("The seed networks, split, are the seed networks", "[tensorsplit][tsan][row52][row53]") {
  for (const ModelKind kind : {ModelKind::seed, ModelKind::seed_bn}) {
    for (const int ranks : {2, 4}) check_network(seed_options(kind), cpus(ranks));
    check_network(seed_options(kind), "cpu:0,cpu:0");
  }
}

TEST_CASE("Each layer may be split without the other", "[tensorsplit][tsan][row52][row53]") {
  for (const Names& layers : {Names{"conv2"}, Names{"fc1"}, Names{"fc1", "conv2"}, Names{}}) {
    check_network(seed_options(ModelKind::seed_bn), cpus(2), layers);
  }
}

TEST_CASE("Layers that do not divide stay whole", "[tensorsplit][row55]") {
  struct Case {
    int ranks;
    Names split;
  };
  for (const auto& [ranks, split] : {Case{1, {}}, Case{2, {"conv2", "fc1"}}, Case{3, {}},
                                     Case{5, {"conv2", "fc1"}}, Case{8, {"fc1"}}}) {
    INFO(ranks << " ranks");
    Network network(seed_options(), cpus(ranks));
    CHECK(network.split->split_names() == split);
    check_network(seed_options(), cpus(ranks));
  }
  SplitMachine machine(cpus(3));
  CHECK(TensorSplit(resnet_options(4), machine.streams, *machine.world).split_names().empty());
  CHECK(TensorSplit(resnet_options(3), machine.streams, *machine.world).split_names().size() == 8);
}

#ifdef LOCKSTEP_DOUBLE  // in float one rounding goes far in it
TEST_CASE("ResNet-18, split, is ResNet-18", "[tensorsplit][row53]") {
  for (const int ranks : {2, 4}) check_network(resnet_options(), cpus(ranks));
  check_network(resnet_options(), cpus(2), Names{"block1.1", "block3.0"});
}
#endif

TEST_CASE("A residual block on several streams", "[tensorsplit][tsan][row53]") {
  check_network(resnet_options(2), cpus(2), Names{"block2.0"});
}

TEST_CASE("On one rank the split network changes no bit", "[tensorsplit]") {
  for (const ModelOptions& options : {seed_options(ModelKind::seed_bn), resnet_options()}) {
    Network single(options, kUnsplit), network(options, cpus(1));
    CHECK((network.train(options) == single.train(options)));
    CHECK(network.split->traffic() == Traffic());
  }
}

TEST_CASE("Masks are those of the unsplit layer's channels", "[tensorsplit]") {
  // Without the offset all ranks would drop what rank 0 drops.
  const ModelOptions options = seed_options();
  SplitMachine machine(cpus(4));
  TensorSplit split(options, machine.streams, *machine.world);
  split.load_full_state(initial_state(options));
  machine.set_state({.step = 2});
  const auto drop = [&](const std::string& name, const Shape& shape, int r) {
    for (const auto& layer : split.module(r).children()) {
      if (layer->name() != name) continue;
      const Tensor ones = machine.put(shape, Values(size_t(shape.elements()), 1))[r];
      return layer->forward(ones, *machine.contexts[r]).to_host();
    }
    return Values();
  };
  Dropout2d whole(Real(0.5), options.seed);
  whole.set_name("drop2d");
  const Shape shape{16, 1, 1, 20};
  const Values expected =
      whole.forward(machine.put(shape, Values(16 * 20, 1))[0], *machine.contexts[0]).to_host();
  for (int r = 0; r < 4; ++r) {
    CHECK((drop("drop2d", {16, 1, 1, 5}, r) == part(expected, shape, 3, 4, r)));
    CHECK((drop("drop1d", {16, 50}, r) == drop("drop1d", {16, 50}, 0)));  // whole: the same
  }
  CHECK((drop("drop2d", {16, 1, 1, 5}, 1) != drop("drop2d", {16, 1, 1, 5}, 0)));
}

// --- Order between the ranks ---------------------------------------------------------------------

TEST_CASE("The result does not depend on which rank is late", "[tensorsplit][tsan]") {
  const ModelOptions options = seed_options(ModelKind::seed_bn);
  struct Case {
    std::optional<Names> layers;
    std::vector<int> late;
  };
  for (const Case& tried : {Case{{}, {0, 2}}, Case{Names{"conv2"}, {3}}, Case{Names{"fc1"}, {1}}}) {
    const auto steps = [&](const std::string& devices, int late) {
      return Network(options, devices, tried.layers, late).train(options);
    };
    const Values expected = steps(cpus(4), -1);
    for (const int late : tried.late) CHECK((steps(cpus(4), late) == expected));
    CHECK((steps("cpu:0,cpu:0,cpu:0,cpu:0", 1) == expected));
    const ScopedEnvironment chaos("LOCKSTEP_CHAOS", "200");
    CHECK((steps(cpus(4), -1) == expected));
  }
}

TEST_CASE("A failure of one rank reaches the others, and nobody hangs", "[tensorsplit][tsan]") {
  const ModelOptions options = seed_options();
  Network network(options, cpus(4));
  const Tensors images = network.machine.put({2, 28, 28, 1}, Values(2 * 28 * 28, 1));
  enqueue(network.machine.streams[2], "fault", [] { throw std::runtime_error("planted fault"); });
  network.forward(images);
  for (const size_t other : {0, 1, 3}) {
    const std::string text =
        message_of<PeerLost>([&] { network.machine.streams[other].synchronize(); });
    CHECK_THAT(text, ContainsSubstring("cpu:2"));
    CHECK_THAT(text, ContainsSubstring("planted fault"));
  }
}

// --- What is exchanged ---------------------------------------------------------------------------

/// "conv2: 1 all-reduces, 0 all-gathers, 8640 bytes" of every layer that exchanged something.
Names exchanged(const TensorSplit& split) {
  Names lines;
  for (const auto& layer : split.layers()) {
    const Traffic t = layer->traffic();
    if (t == Traffic()) continue;
    lines.push_back(fmt::format("{}: {} + {}, {}", layer->name(), t.all_reduces, t.all_gathers,
                                t.bytes / kReal));
  }
  return lines;
}

/// The number of all-reduces that the ranks' streams ran, by scope; all ranks agree on them.
std::map<std::string, int> all_reduces_run(const Network& network) {
  std::vector<std::map<std::string, int>> counts;
  for (const Stream& stream : network.machine.streams) {
    stream.synchronize();
    counts.emplace_back();
    for (const Span& span : stream.backend().timeline()) {
      if (std::string(span.op) == "sum_ranks") ++counts.back()[*span.scope];
    }
    CHECK(counts.back() == counts[0]);
  }
  return counts[0];
}

TEST_CASE("The collectives are those of the table and none else", "[tensorsplit][row56]") {
  const ModelOptions options = seed_options(ModelKind::seed_bn);
  constexpr int64_t n = 3;
  const int64_t conv2_in = n * 12 * 12 * 10, fc1_in = n * 320, fc1_out = n * 50;
  for (const int ranks : {2, 4}) {
    const auto sum = [&](const std::string& layer, int64_t numbers) {
      return fmt::format("{}: 1 + 0, {}", layer, sent_for_sum(numbers, ranks));
    };
    const auto gather = [&](const std::string& layer, int64_t numbers) {
      return fmt::format("{}: 0 + 1, {}", layer, sent_for_gather(numbers, ranks));
    };
    struct Case {
      std::optional<Names> layers;
      Names lines;  // layer: all-reduces + all-gathers, numbers
      std::map<std::string, int> run;
    };
    const std::string conv2 = sum("conv2", conv2_in), fc1 = sum("fc1", fc1_out);
    for (const auto& [layers, lines, run] :
         {Case{{}, {conv2, fc1}, {{"conv2", 1}, {"fc1", 1}}},
          Case{Names{"conv2"}, {conv2, gather("fc1.join", fc1_in)}, {{"conv2", 1}}},
          Case{Names{"fc1"}, {gather("fc1.take", fc1_in), fc1}, {{"fc1", 1}}},
          Case{Names{}, {}, {}}}) {
      Network network(options, cpus(ranks), layers, -1, {.trace = true});
      network.step(Batch(options, n));
      CHECK(exchanged(*network.split) == lines);
      CHECK(all_reduces_run(network) == run);
      CHECK(network.split->traffic() == network.split->predicted_traffic());
      network.evaluate(Batch(options, n));  // does not count
      CHECK(exchanged(*network.split) == lines);
      CHECK(network.split->traffic() == network.split->predicted_traffic());
    }
  }
}

TEST_CASE("A residual block has one all-reduce forward and one backward", "[tensorsplit][row56]") {
  const ModelOptions options = resnet_options();
  Network network(options, cpus(2), {}, -1, {.trace = true});
  constexpr int64_t n = 3;
  network.step(Batch(options, n));
  Names expected;
  // Pixels and channels of each block's input and output.
  const int64_t in[] = {64 * 4, 64 * 4, 64 * 4, 16 * 8, 16 * 8, 4 * 16, 4 * 16, 1 * 32};
  const int64_t out[] = {64 * 4, 64 * 4, 16 * 8, 16 * 8, 4 * 16, 4 * 16, 1 * 32, 1 * 32};
  std::map<std::string, int> run;
  for (int i = 0; i < 8; ++i) {
    const std::string block = fmt::format("block{}.{}", i / 2 + 1, i % 2);
    expected.push_back(fmt::format("{}: 2 + 0, {}", block, n * (in[i] + out[i])));
    run[block + ".conv1"] = run[block + ".conv2"] = 1;
  }
  CHECK(exchanged(*network.split) == expected);
  CHECK(all_reduces_run(network) == run);
  CHECK(network.split->traffic() == network.split->predicted_traffic());
}

TEST_CASE("What ranks run carries the layers' names", "[tensorsplit]") {
  Network network(seed_options(ModelKind::seed_bn), cpus(2), {}, -1, {.trace = true});
  network.step(Batch(seed_options(), 2));
  for (const Stream& stream : network.machine.streams) {
    stream.synchronize();
    std::set<std::string> scopes;
    for (const Span& span : stream.backend().timeline()) {
      if (span.scope != nullptr) scopes.insert(*span.scope);
    }
    CHECK(scopes == std::set<std::string>{"conv1", "bn1", "pool1", "conv2", "bn2", "drop2d",
                                          "pool2", "flatten", "fc1", "drop1d", "fc2",
                                          "log_softmax"});
  }
}

TEST_CASE("A rank has its part of the parameters, and a steady step allocates nothing",
          "[tensorsplit]") {
  const ModelOptions options = seed_options();
  for (const auto& [ranks, count] : {std::pair{1, 21'840}, {2, 11'330}, {4, 6'075}}) {
    Network network(options, cpus(ranks));
    for (int r = 0; r < ranks; ++r) CHECK(network.split->parameters(r).count() == count);
    const auto allocations = [&] {
      int64_t sum = 0;
      for (Context* context : network.machine.contexts) sum += context->pool().allocations();
      return sum;
    };
    network.step(Batch(options, 6));
    const int64_t after_one = allocations();
    network.step(Batch(options, 6));
    CHECK(allocations() == after_one);
  }
}

// --- The state -----------------------------------------------------------------------------------

TEST_CASE("Shards put together are the checkpoint, from 2 ranks to 4 to 1",
          "[tensorsplit][row57]") {
  for (const ModelOptions& options : {seed_options(ModelKind::seed_bn), resnet_options()}) {
    // A state in which no two tensors are alike, running statistics included.
    Network trained(options, kUnsplit);
    trained.train(options);
    const State checkpoint = trained.state();
    State state = checkpoint;
    for (const int ranks : {2, 4, 1}) {
      INFO(ranks << " ranks");
      Network network(options, cpus(ranks));
      network.split->load_full_state(state);
      state = network.split->full_state();
      check_states(state, checkpoint, 0);
    }
    Network again(options, kUnsplit);
    load_state_dict(*again.model.network, state);
    const Batch batch(options, 4);
    CHECK((again.evaluate(batch) == trained.evaluate(batch)));
  }
}

TEST_CASE("Every rank has its part, under the unsplit network's names", "[tensorsplit][row57]") {
  const ModelOptions options = seed_options(ModelKind::seed_bn);
  const State state = initial_state(options, 3);
  const std::map<std::string, int> axes{
      {"conv2.weight", 0},     {"conv2.bias", 0},      {"bn2.weight", 0}, {"bn2.bias", 0},
      {"bn2.running_mean", 0}, {"bn2.running_var", 0}, {"fc1.weight", 1}};
  for (const int ranks : {2, 4}) {
    Network network(options, cpus(ranks));
    network.split->load_full_state(state);
    for (int r = 0; r < ranks; ++r) {
      const State found = state_dict(network.split->module(r));
      REQUIRE(found.size() == state.size());
      for (size_t i = 0; i < state.size(); ++i) {
        INFO(state[i].name << " of rank " << r);
        CHECK(found[i].name == state[i].name);
        const auto axis = axes.find(state[i].name);
        CHECK((found[i].real == part(state[i].real, state[i].shape,
                                     axis == axes.end() ? kWhole : axis->second, ranks, r)));
      }
    }
  }
}

TEST_CASE("A state that does not fit is refused by the unsplit shapes, and nothing changes",
          "[tensorsplit][row57]") {
  const ModelOptions options = seed_options();
  Network network(options, cpus(2));
  const State before = network.state();
  State bad = initial_state(options, 9);
  for (StateTensor& tensor : bad) {
    if (tensor.name != "conv2.bias") continue;
    tensor.shape = {10};
    tensor.real.resize(10);
  }
  std::erase_if(bad, [](const StateTensor& tensor) { return tensor.name == "fc2.bias"; });
  const std::string text = message_of<BadInput>([&] { network.split->load_full_state(bad); });
  CHECK_THAT(text, ContainsSubstring("conv2.bias has shape [10], expected [20]"));
  CHECK_THAT(text, ContainsSubstring("missing fc2.bias"));
  check_states(network.state(), before, 0);
}

}  // namespace
}  // namespace lockstep
