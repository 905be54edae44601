// Where a network is cut, and what the naive split computes.

#include <limits>
#include <random>
#include <set>

#include "common/core/error.h"
#include "common/nn/batch_norm.h"
#include "common/nn/state_dict.h"
#include "common/training/weights_file.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/machine.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/process.h"
#include "tests/unit/03/pipeline_runs.h"

namespace lockstep {
namespace {

using namespace testing::pipelines;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using testing::cpus;
using testing::Machine;
using testing::message_of;
using testing::random_values;
using Names = std::vector<std::string>;
using Values = std::vector<Real>;

// --- Where to cut --------------------------------------------------------------------------------

TEST_CASE("A Sequential gives its layers away under their full names", "[pipeline]") {
  CHECK(names_of(layers_of({})) ==
        Names{"conv1", "pool1", "conv2", "pool2", "flatten", "fc1", "fc2", "log_softmax"});
  const ModelOptions resnet{.kind = ModelKind::resnet18, .width = 2};
  const Layers layers = layers_of(resnet);
  CHECK(names_of(layers) == Names{"stem_conv", "stem_bn", "block1.0", "block1.1", "block2.0",
                                  "block2.1", "block3.0", "block3.1", "block4.0", "block4.1", "gap",
                                  "flatten", "fc"});
  Names expected, found;
  const Model whole = make_model(resnet);
  for (const Parameter* p : whole.network->parameters()) expected.push_back(p->name);
  for (const auto& layer : layers) {
    for (const Parameter* p : layer->parameters()) found.push_back(p->name);
  }
  CHECK(found == expected);
}

TEST_CASE("No other cuts make the costliest stage cheaper", "[pipeline]") {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<double> costs(1 + random() % 8);
    for (double& cost : costs) cost = double(random() % 12);  // zeros among them
    const auto costliest = [&](const Cuts& cuts) {
      double most = 0, sum = 0;
      for (size_t layer = 0; layer < costs.size(); ++layer) {
        if (std::find(cuts.begin(), cuts.end(), layer) != cuts.end()) sum = 0;
        most = std::max(most, sum += costs[layer]);
      }
      return most;
    };
    std::vector<double> best(costs.size(), std::numeric_limits<double>::infinity());
    for (unsigned mask = 0; mask < 1u << (costs.size() - 1); ++mask) {
      Cuts cuts;
      for (size_t layer = 1; layer < costs.size(); ++layer) {
        if (mask >> (layer - 1) & 1) cuts.push_back(layer);
      }
      best[cuts.size()] = std::min(best[cuts.size()], costliest(cuts));
    }
    for (size_t stages = 1; stages <= costs.size(); ++stages) {
      const Cuts cuts = balanced_cuts(costs, static_cast<int>(stages));
      REQUIRE(cuts.size() == stages - 1);
      REQUIRE(std::set<size_t>(cuts.begin(), cuts.end()).size() == cuts.size());
      REQUIRE(std::is_sorted(cuts.begin(), cuts.end()));
      REQUIRE((cuts.empty() || (cuts.front() > 0 && cuts.back() < costs.size())));
      REQUIRE(costliest(cuts) == best[stages - 1]);
    }
  }
  const std::vector<double> two_layers{1, 2};
  for (const int stages : {0, 3}) {
    CHECK_THAT(message_of<BadInput>([&] { balanced_cuts(two_layers, stages); }),
               ContainsSubstring(fmt::format("{} stages of 2 layers, expected 1 to 2", stages)));
  }
}

TEST_CASE("--split is a list of layers, or what is to be balanced", "[pipeline][row48]") {
  const Machine machine(cpus(1));
  const Layers layers = layers_of({});
  const auto choose = [&](const std::string& text, int stages) {
    return choose_cuts(text, layers, stages, {4, 28, 28, 1}, machine.streams[0]);
  };
  CHECK(choose("3,6", 3) == Cuts{3, 6});
  CHECK(choose("1,2,3,4,5,6,7", 8) == Cuts{1, 2, 3, 4, 5, 6, 7});
  CHECK(choose("auto", 2) == Cuts{2});        // conv2 does most of the work
  CHECK(choose("parameters", 2) == Cuts{5});  // fc1 has most of the weights
  CHECK(choose("measured", 2).size() == 1);
  for (const char* text : {"auto", "parameters", "measured"}) {
    CHECK(choose(text, 1).empty());
    CHECK(choose(text, 8) == Cuts{1, 2, 3, 4, 5, 6, 7});
    CHECK_THAT(message_of<BadInput>([&] { choose(text, 9); }),
               ContainsSubstring("9 stages of 8 layers"));
  }
  const auto refused = [&](const std::string& text, int stages, const std::string& why) {
    INFO("--split '" << text << "'");
    const std::string found = message_of<BadInput>([&] { choose(text, stages); });
    CHECK_THAT(found, StartsWith("--split: "));
    CHECK_THAT(found, ContainsSubstring(why));
    CHECK(found.find('\n') == found.npos);
  };
  for (const char* text : {"", "3,,6", ",3", "3,", "x", "3x,6", "-3,6", "3 ,6", "Auto", "1e1"}) {
    refused(text, 3,
            fmt::format("--split: found '{}', expected auto, measured, parameters, or", text));
  }
  refused("3", 3, "3 makes 2 stages, --devices names 3");
  refused("3,6", 2, "3,6 makes 3 stages, --devices names 2");
  refused("0", 2, "cut 0 leaves a stage without layers; expected rising numbers from 1 to 7");
  refused("8", 2, "cut 8");
  refused("9", 2, "cut 9");
  refused("3,3", 3, "cut 3");
  refused("6,3", 3, "cut 3");
}

TEST_CASE("Layers are measured without leaving a trace", "[pipeline]") {
  const testing::TestDevice d;
  const Layers layers = layers_of({.kind = ModelKind::seed_bn, .dropout = true});
  probe_layers(layers, {4, 28, 28, 1}, d.stream);  // the device's workspaces stay
  const int64_t before = d.device->memory().current();
  const auto costs = probe_layers(layers, {4, 28, 28, 1}, d.stream);
  CHECK(d.device->memory().current() == before);
  REQUIRE(costs.size() == layers.size());
  for (size_t i = 0; i < costs.size(); ++i) {
    const std::string& name = costs[i].name;
    INFO(name);
    CHECK(name == layers[i]->name());
    const bool products = name.starts_with("conv") || name.starts_with("fc");
    CHECK((costs[i].flops > 0) == products);
    CHECK((costs[i].parameter_bytes > 0) == (products || name.starts_with("bn")));
    CHECK(costs[i].seconds > 0);
    for (const Parameter* p : layers[i]->parameters()) {
      CHECK_FALSE((p->value.defined() || p->grad.defined()));
    }
    for (const ModelBuffer* b : layers[i]->buffers()) CHECK_FALSE(b->value.defined());
    if (const auto* norm = dynamic_cast<const BatchNorm2d*>(layers[i].get())) {
      CHECK(norm->batches_tracked() == 0);
    }
    // 8 x 8 pixels of 20 channels, each 5 x 5 x 10 products and sums: forward, and twice backward.
    if (name == "conv2") CHECK(costs[i].flops == 3.0 * 4 * 8 * 8 * 20 * 250 * 2);
  }
}

// --- The naive split -----------------------------------------------------------------------------

/// What two passes of training, without waiting between them, and one of evaluation make.
struct Passes {
  Values scores, gradients, statistics, evaluation;
  double flops;
};

Passes passes(Module& network, Stream stream) {
  Context context(stream);
  const auto put = [&](const Shape& shape, uint32_t seed) {
    return Tensor::from_host(stream, shape, random_values(shape, seed));
  };
  const Tensor first = put({5, 16, 16, 1}, 1), second = put({3, 16, 16, 1}, 2);
  const Tensor scores_gradient = put({5, 10}, 3);
  const StepState states[] = {{.step = 3}, {.step = 4}};
  stream.copy(context.state().data(), &states[0], sizeof(StepState));
  const Tensor scores = network.forward(first, context);
  CHECK(scores.home() == stream);
  network.backward(scores_gradient, context);
  stream.copy(context.state().data(), &states[1], sizeof(StepState));
  network.forward(second, context);
  network.backward(scores_gradient.rows(0, 3), context);  // adds
  const double flops = context.flops();
  context.facts.training = false;
  const Tensor evaluation = network.forward(second, context);
  const Values values = evaluation.to_host();
  return {scores.to_host(), all_of(network, &Parameter::grad), statistics_of(network), values,
          flops};
}

TEST_CASE("A split network computes what it does in one piece, to the bit",
          "[pipeline][tsan][row42]") {
  const ModelOptions model = small(true, ModelKind::seed_bn);
  const Machine one(cpus(1));
  const Model whole = make_model(model);
  const FlatParameters parameters(*whole.network, one.streams[0]);
  initialize(parameters, Initializer::kaiming_uniform, 1);
  const Passes expected = passes(*whole.network, one.streams[0]);
  const auto check = [&](const std::vector<Stream>& streams) {
    INFO(streams.size() << " stages");
    const Passes found = passes(*split_of(layers_of(model), streams), streams[0]);
    CHECK((found.scores == expected.scores));
    CHECK((found.gradients == expected.gradients));
    CHECK((found.statistics == expected.statistics));
    CHECK((found.evaluation == expected.evaluation));
    CHECK(found.flops == expected.flops);
  };
  for (const int stages : {1, 2, 3, 4, static_cast<int>(layers_of(model).size())}) {
    check(Machine(cpus(stages)).streams);
  }
  check(Machine("cpu:0,cpu:0,cpu:0").streams);  // the same device, opened three times
  check({one.streams[0], one.devices[0]->create_stream("2"), one.devices[0]->create_stream("3")});
}

TEST_CASE("A split network may go while a stage still reads what another made",
          "[pipeline][tsan]") {
  const Machine machine(cpus(3));
  Context context(machine.streams[0]);
  const Tensor x = Tensor::from_host(context.stream(), {2, 16, 16, 1}, Values(512, 1));
  const Tensor scores_gradient = Tensor::from_host(context.stream(), {2, 10}, Values(20, 1));
  std::unique_ptr<StagedNetwork> split = split_of(layers_of(small()), machine.streams);
  split->forward(x, context);
  sleep(10)(context.stream());
  split->backward(scores_gradient, context);
  split.reset();
  for (const Stream& stream : machine.streams) CHECK_NOTHROW(stream.synchronize());
}

TEST_CASE("A split network's state is that of the whole one", "[pipeline]") {
  const ModelOptions model = small(false, ModelKind::seed_bn);
  const Machine machine(cpus(3));
  const Model whole = make_model(model);
  const FlatParameters parameters(*whole.network, machine.streams[0]);
  initialize(parameters, Initializer::kaiming_uniform, 1);
  const std::unique_ptr<StagedNetwork> split = split_of(layers_of(model), machine.streams);
  passes(*split, machine.streams[0]);  // moves the running statistics
  for (const Parameter* p : whole.network->parameters()) {
    p->value.copy_from_host(Values(static_cast<size_t>(p->shape.elements()), 0));
  }
  const testing::TempDir directory;
  const std::string path = directory / "weights.safetensors";
  const auto same = [&] {
    const auto expected = state_dict(*whole.network), found = state_dict(*split);
    return std::ranges::equal(found, expected, [](const StateTensor& a, const StateTensor& b) {
      return a.name == b.name && a.shape == b.shape && a.real == b.real && a.integer == b.integer;
    });
  };
  CHECK_FALSE(same());
  save_weights(path, *split);
  load_weights(path, *whole.network);
  CHECK(same());
  initialize(parameters, Initializer::normal, 2);
  CHECK_FALSE(same());
  save_weights(path, *whole.network);
  load_weights(path, *split);
  CHECK(same());
}

TEST_CASE("A split by hand that cannot be is refused", "[pipeline][row48]") {
  const Machine machine(cpus(3));
  for (const Cuts& cuts : {Cuts{3}, Cuts{3, 3}, Cuts{0, 3}, Cuts{6, 3}, Cuts{3, 8}, Cuts{3, 9}}) {
    const std::string text =
        message_of<BadInput>([&] { StagedNetwork(layers_of({}), cuts, machine.streams); });
    CHECK_THAT(text, StartsWith("StagedNetwork: stage"));
    CHECK(text.find('\n') == text.npos);
  }
}

}  // namespace
}  // namespace lockstep
