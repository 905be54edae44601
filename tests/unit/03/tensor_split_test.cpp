// Networks split inside their layers: the same numbers as in one piece, the traffic that this
// takes, and the state.

#include "03-model-split/tensor/tensor_split.h"

#include <set>

#include "common/core/stream_backend.h"
#include "common/nn/layers.h"
#include "tests/support/data_test_files.h"
#include "tests/unit/03/tensor_split_runs.h"

namespace lockstep {
namespace {

using namespace testing::tensor_split;
using Catch::Matchers::ContainsSubstring;
using testing::enqueue;
using testing::message_of;
using testing::Ranks;
using testing::ScopedEnvironment;

TEST_CASE("The seed networks, split, are the seed networks", "[tensorsplit][tsan][row52][row53]") {
  for (const ModelKind kind : {ModelKind::seed, ModelKind::seed_bn}) {
    for (const int ranks : {2, 4}) check_network(seed_options(kind), ranks);
  }
}

TEST_CASE("Each layer may be split without the other", "[tensorsplit][tsan][row52][row53]") {
  for (const Names& layers : {Names{"conv2"}, Names{"fc1"}, Names{"fc1", "conv2"}, Names{}}) {
    check_network(seed_options(ModelKind::seed_bn), 2, layers);
  }
}

/// The layers that so many ranks split.
Names split_names(const ModelOptions& options, int ranks) {
  return on_ranks(ranks,
                  [&](Member& member) { return TensorSplit(options, member.shared).split_names(); })
      .front();
}

TEST_CASE("Layers that do not divide stay whole", "[tensorsplit][row55]") {
  struct Case {
    int ranks;
    Names split;
  };
  for (const auto& [ranks, names] :
       {Case{1, {}}, Case{2, {"conv2", "fc1"}}, Case{5, {"conv2", "fc1"}}, Case{8, {"fc1"}}}) {
    INFO(ranks << " ranks");
    CHECK(split_names(seed_options(), ranks) == names);
    if (ranks == 8 || testing::full_campaign()) check_network(seed_options(), ranks);
  }
  CHECK(split_names(resnet_options(3), 3).size() == 8);
}

/// Layers of 24 features.
ModelOptions perceptron(int64_t depth) {
  return {.kind = ModelKind::mlp, .width = 6, .depth = depth, .height = 6, .width_pixels = 5};
}

TEST_CASE("A perceptron's layers are split in pairs, and one that is left over by itself",
          "[tensorsplit][tsan]") {
  CHECK(split_names(perceptron(5), 2) == Names{"fc1", "fc2", "fc3", "fc4"});
  for (const int ranks : {2, 3, 8}) check_network(perceptron(5), ranks);
  for (const Names& layers :
       {Names{"fc1"}, Names{"fc2"}, Names{"fc1", "fc3"}, Names{"fc2", "fc3"}}) {
    check_network(perceptron(4), 2, layers);
  }
  check_network(perceptron(4), 2);
}

#ifdef LOCKSTEP_DOUBLE  // in float one rounding goes far in it
TEST_CASE("ResNet-18, split, is ResNet-18", "[tensorsplit][row53]") {
  for (const int ranks : {2, 4}) check_network(resnet_options(), ranks);
  check_network(resnet_options(3), 3);
  check_network(resnet_options(), 2, Names{"block1.1", "block3.0"});
}
#endif

TEST_CASE("A residual block on several ranks", "[tensorsplit][tsan][row53]") {
  check_network(resnet_options(2), 2, Names{"block2.0"});
}

/// How many steps each of two ranks has skipped after one in which rank `who` has a gradient that
/// is not finite.
std::vector<int64_t> steps_skipped(int who) {
  return on_ranks(2, [&](Member& member) {
    TensorSplit split(seed_options(), member.shared);
    const FlatParameters parameters(split, member.stream);
    split.initialize(Initializer::kaiming_uniform, 1);
    const Optimizer optimizer = split.optimizer(parameters, {.growth_interval = 2});
    const Batch batch(seed_options(), 4);
    const AnyTensor scores = split.forward(member.put(batch.shape, batch.images), member.context);
    optimizer.zero_gradients();
    if (member.rank() == who) {
      member.stream.kernels().fill(member.stream, std::numeric_limits<Real>::infinity(),
                                   parameters.gradients().range(0, {1}));
    }
    const Values zeros(size_t(scores.elements()), 0);
    split.backward(member.put(scores.shape(), zeros), member.context);
    optimizer.step(member.context.state(), parameters.loss());
    return optimizer.health().to_host()[0].skipped;
  });
}

TEST_CASE("A gradient that overflows on one rank skips the step on all of them",
          "[tensorsplit][tsan]") {
  CHECK(steps_skipped(0) == std::vector<int64_t>{1, 1});
  CHECK(steps_skipped(1) == std::vector<int64_t>{1, 1});
  CHECK(steps_skipped(2) == std::vector<int64_t>{0, 0});
}

TEST_CASE("On one rank the split network changes no bit", "[tensorsplit]") {
  for (const ModelOptions& options : {seed_options(ModelKind::seed_bn), resnet_options()}) {
    const auto train = [&](Network& network) { return network.train(options); };
    CHECK((split(options, 1, {}, train)[0] == unsplit(options, train)));
  }
}

TEST_CASE("A network starts with the values of the unsplit one", "[tensorsplit]") {
  for (const ModelOptions& options : {seed_options(ModelKind::seed_bn), resnet_options()}) {
    const auto states = split(options, 2, {}, [](Network& network) {
      network.split->initialize(Initializer::kaiming_uniform, 3);
      return network.state();
    });
    for (const State& state : states) check_states(state, initial_state(options, 3), 0);
  }
}

TEST_CASE("Masks are those of the unsplit layer's channels", "[tensorsplit]") {
  // Without the offset all ranks would drop what rank 0 drops.
  const ModelOptions options = seed_options();
  struct Masks {
    Values whole, channels, features;
  };
  const auto masks = split(options, 4, {}, [&](Network& network) {
    Member& member = network.member;
    member.set_state({.step = 2});
    const auto drop = [&](Module& layer, const Shape& shape) {
      const Tensor ones = member.put(shape, Values(size_t(shape.elements()), 1));
      return layer.forward(ones, member.context).to_host();
    };
    Dropout2d whole(Real(0.5), options.seed);
    whole.set_name("drop2d");
    Masks found{drop(whole, {16, 1, 1, 20}), {}, {}};
    for (const auto& layer : network.split->children()) {
      if (layer->name() == "drop2d") found.channels = drop(*layer, {16, 1, 1, 5});
      if (layer->name() == "drop1d") found.features = drop(*layer, {16, 50});
    }
    return found;
  });
  for (int r = 0; r < 4; ++r) {
    const Masks& mine = masks[size_t(r)];
    CHECK((mine.channels == part(mine.whole, {16, 1, 1, 20}, 3, 4, r)));
    CHECK((mine.features == masks[0].features));  // whole: the same
  }
  CHECK((masks[1].channels != masks[0].channels));
}

// --- Order between the ranks ---------------------------------------------------------------------

TEST_CASE("The result does not depend on which rank is late", "[tensorsplit][tsan]") {
  const ModelOptions options = seed_options(ModelKind::seed_bn);
  struct Case {
    std::optional<Names> layers;
    std::vector<int> late;
  };
  for (const Case& tried : {Case{{}, {0, 2}}, Case{Names{"conv2"}, {3}}, Case{Names{"fc1"}, {1}}}) {
    if (tried.layers && !testing::full_campaign()) continue;
    const auto steps = [&](int late) {
      return split(
          options, 4, tried.layers, [&](Network& network) { return network.train(options); }, late);
    };
    const std::vector<Values> expected = steps(-1);
    for (const int late : tried.late) CHECK((steps(late) == expected));
    const ScopedEnvironment chaos("LOCKSTEP_CHAOS", "200");
    CHECK((steps(-1) == expected));
  }
}

TEST_CASE("A failure of one rank reaches the others, and nobody hangs", "[tensorsplit][tsan]") {
  Ranks ranks = testing::shm_ranks(4);
  const std::vector<std::string> errors = testing::run_ranks(4, [&](int rank) {
    {
      Member member(*ranks.comms[size_t(rank)], *ranks.devices[size_t(rank)], false);
      Network network(seed_options(), member, std::nullopt);
      const Tensor images = member.put({2, 28, 28, 1}, Values(2 * 28 * 28, 1));
      if (rank == 2) {
        // As where a process ends: its device fails, and its connections close.
        enqueue(member.stream, "fault", [] { throw std::runtime_error("planted fault"); });
        ranks.comms[2].reset();
        member.stream.synchronize();
      }
      network.model.network->forward(images, member.context);
      member.stream.synchronize();
    }
  });
  CHECK_THAT(errors[2], ContainsSubstring("planted fault"));
  // The first to notice closes its connections, too, and then another may see those first.
  int that_name_it = 0;
  for (const size_t other : {0, 1, 3}) {
    CHECK_THAT(errors[other],
               ContainsSubstring("closed the connection") && ContainsSubstring("for fc1"));
    that_name_it += errors[other].find("rank 2 closed") != std::string::npos;
  }
  CHECK(that_name_it > 0);
}

// --- What is exchanged ---------------------------------------------------------------------------

/// "conv2: 1 + 0, 8640": every layer's all-reduces and all-gathers, and the bytes by sizes.
Names exchanged(const SplitRanks& ranks) {
  Names lines;
  for (const auto& [layer, traffic] : ranks.traffic()) {
    lines.push_back(fmt::format("{}: {} + {}, {:.0f}", layer, traffic.all_reduces,
                                traffic.all_gathers, traffic.bytes));
  }
  return lines;
}

/// What a step exchanged, as a rank says and counts it, and whether an evaluation adds to it.
struct Exchange {
  Names said, after_evaluation;
  double sent = 0, sent_after_evaluation = 0, predicted = 0;
};
std::vector<Exchange> exchange(const ModelOptions& options, int ranks,
                               const std::optional<Names>& layers, int64_t samples) {
  return split(options, ranks, layers, [&](Network& network) {
    const SplitRanks& shared = network.member.shared;
    Exchange found;
    network.step(Batch(options, samples));
    network.member.stream.synchronize();
    found.said = exchanged(shared);
    found.sent = double(shared.comm().bytes_sent(Purpose::activations));
    for (const auto& [layer, traffic] : shared.traffic()) found.predicted += traffic.bytes;
    network.evaluate(Batch(options, samples));  // does not count
    found.after_evaluation = exchanged(shared);
    found.sent_after_evaluation = double(shared.comm().bytes_sent(Purpose::activations));
    return found;
  });
}

std::string sum(const std::string& layer, int64_t numbers, int ranks) {
  return fmt::format("{}: 1 + 0, {:.0f}", layer, sent_for_sum(numbers, ranks, /*in_shm=*/true));
}
std::string gather(const std::string& layer, int64_t numbers, int ranks) {
  return fmt::format("{}: 0 + 1, {:.0f}", layer, sent_for_gather(numbers, ranks));
}

TEST_CASE("The collectives are those of the table and none else", "[tensorsplit][row56]") {
  const ModelOptions options = seed_options(ModelKind::seed_bn);
  constexpr int64_t n = 3;
  const int64_t conv2_in = n * 12 * 12 * 10, fc1_in = n * 320, fc1_out = n * 50;
  for (const int ranks : {2, 4}) {
    const std::string conv2 = sum("conv2", conv2_in, ranks), fc1 = sum("fc1", fc1_out, ranks);
    struct Case {
      std::optional<Names> layers;
      Names lines;  // layer: all-reduces + all-gathers, bytes
    };
    for (const auto& [layers, lines] :
         {Case{{}, {conv2, fc1}}, Case{Names{"conv2"}, {conv2, gather("fc1.join", fc1_in, ranks)}},
          Case{Names{"fc1"}, {fc1, gather("fc1.take", fc1_in, ranks)}}, Case{Names{}, {}}}) {
      for (const Exchange& of_rank : exchange(options, ranks, layers, n)) {
        CHECK(of_rank.said == lines);
        CHECK(of_rank.after_evaluation == lines);
        CHECK(of_rank.sent_after_evaluation == of_rank.sent);
        CHECK(of_rank.sent == of_rank.predicted);
      }
    }
  }
}

TEST_CASE("A residual block has one all-reduce forward and one backward", "[tensorsplit][row56]") {
  constexpr int64_t n = 3;
  Names expected;
  // Pixels and channels of each block's input and output.
  const int64_t in[] = {64 * 4, 64 * 4, 64 * 4, 16 * 8, 16 * 8, 4 * 16, 4 * 16, 1 * 32};
  const int64_t out[] = {64 * 4, 64 * 4, 16 * 8, 16 * 8, 4 * 16, 4 * 16, 1 * 32, 1 * 32};
  for (int i = 0; i < 8; ++i) {
    const std::string block = fmt::format("block{}.{}", i / 2 + 1, i % 2);
    expected.push_back(sum(block + ".conv1", n * in[i], 2));
    expected.push_back(sum(block + ".conv2", n * out[i], 2));
  }
  for (const Exchange& of_rank : exchange(resnet_options(), 2, {}, n)) {
    CHECK(of_rank.said == expected);
    CHECK(of_rank.sent == of_rank.predicted);
  }
}

TEST_CASE("A pair of a perceptron's layers has one all-reduce forward and one backward",
          "[tensorsplit]") {
  constexpr int64_t n = 3, features = n * 24;
  // Nobody needs the gradient of the images, so that fc1 has none; fc3 of four has no second.
  const Names expected{sum("fc2", features, 2), sum("fc3", features, 2),
                       gather("fc4.join", features, 2)};
  for (const Exchange& of_rank : exchange(perceptron(4), 2, {}, n)) {
    CHECK(of_rank.said == expected);
    CHECK(of_rank.sent == of_rank.predicted);
  }
}

TEST_CASE("What a rank runs carries the layers' names", "[tensorsplit]") {
  const auto ranks = testing::shm_ranks(2);
  const auto found = on_ranks(ranks, [&](Member& member) {
    const auto device = open_device({DeviceId::Kind::cpu, member.rank()}, {.trace = true});
    Member traced(member.shared.comm(), *device, false);
    Network network(seed_options(ModelKind::seed_bn), traced, std::nullopt);
    network.step(Batch(seed_options(), 2));
    traced.stream.synchronize();
    std::set<std::string> scopes;
    for (const Span& span : traced.stream.backend().timeline()) {
      if (span.scope != nullptr) scopes.insert(*span.scope);
    }
    return scopes;
  });
  for (const std::set<std::string>& scopes : found) {
    CHECK(scopes == std::set<std::string>{"conv1", "bn1", "pool1", "conv2", "bn2", "drop2d",
                                          "pool2", "flatten", "fc1", "drop1d", "fc2",
                                          "log_softmax"});
  }
}

TEST_CASE("A rank has its part of the parameters, and a steady step allocates nothing",
          "[tensorsplit]") {
  const ModelOptions options = seed_options();
  for (const auto& [ranks, count] : {std::pair{1, 21'840}, {2, 11'330}, {4, 6'075}}) {
    const auto found = split(options, ranks, {}, [&](Network& network) {
      std::vector<int64_t> numbers{network.parameters->count(), network.split->parameter_count()};
      for (int step = 0; step < 2; ++step) {
        network.step(Batch(options, 6));
        numbers.push_back(network.member.context.pool().allocations());
      }
      return numbers;
    });
    for (const std::vector<int64_t>& of_rank : found) {
      CHECK(of_rank[0] == count);
      CHECK(of_rank[1] == 21'840);
      CHECK(of_rank[3] == of_rank[2]);
    }
  }
}

// --- The state -----------------------------------------------------------------------------------

TEST_CASE("Shards put together are the checkpoint, from 2 ranks to 4 to 1",
          "[tensorsplit][row57]") {
  for (const ModelOptions& options : {seed_options(ModelKind::seed_bn), resnet_options()}) {
    // A state in which no two tensors are alike, running statistics included.
    const Batch batch(options, 4);
    struct Trained {
      State state;
      Values scores;
    };
    const Trained trained = unsplit(options, [&](Network& network) {
      network.train(options);
      return Trained{network.state(), network.evaluate(batch)};
    });
    State state = trained.state;
    for (const int ranks : {2, 4, 1}) {
      INFO(ranks << " ranks");
      const auto states = split(options, ranks, {}, [&](Network& network) {
        network.split->load_full_state(state);
        return network.state();
      });
      for (const State& of_rank : states) check_states(of_rank, trained.state, 0);
      state = states.back();
    }
    CHECK((unsplit(options, [&](Network& network) {
             load_state_dict(*network.model.network, state);
             return network.evaluate(batch);
           }) == trained.scores));
  }
}

TEST_CASE("Every rank has its part, under the unsplit network's names", "[tensorsplit][row57]") {
  const ModelOptions options = seed_options(ModelKind::seed_bn);
  const State state = initial_state(options, 3);
  const std::map<std::string, int> axes{
      {"conv2.weight", 0},     {"conv2.bias", 0},      {"bn2.weight", 0}, {"bn2.bias", 0},
      {"bn2.running_mean", 0}, {"bn2.running_var", 0}, {"fc1.weight", 1}};
  for (const int ranks : {2, 4}) {
    const auto shares = split(options, ranks, {}, [&](Network& network) {
      network.split->load_full_state(state);
      return state_dict(*network.split);
    });
    for (int r = 0; r < ranks; ++r) {
      const State& found = shares[size_t(r)];
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
  State bad = initial_state(options, 9);
  for (StateTensor& tensor : bad) {
    if (tensor.name != "conv2.bias") continue;
    tensor.shape = {10};
    tensor.real.resize(10);
  }
  std::erase_if(bad, [](const StateTensor& tensor) { return tensor.name == "fc2.bias"; });
  struct Tried {
    State before, after;
    std::string text;
  };
  const auto found = split(options, 2, {}, [&](Network& network) {
    const State before = network.state();
    const std::string text = message_of<BadInput>([&] { network.split->load_full_state(bad); });
    return Tried{before, network.state(), text};
  });
  for (const Tried& of_rank : found) {
    CHECK_THAT(of_rank.text, ContainsSubstring("conv2.bias has shape [10], expected [20]"));
    CHECK_THAT(of_rank.text, ContainsSubstring("missing fc2.bias"));
    check_states(of_rank.after, of_rank.before, 0);
  }
}

}  // namespace
}  // namespace lockstep
