// Stage 07's axis `pipeline` leads to stage 01's weights, beside all other axes and in any order.

#include <iterator>

#include "tests/equivalence/meshes.h"
#include "tests/support/refusals.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

const std::string kMeshStage = "07-mesh";

/// 30 steps of 13 samples, of which neither two ranks nor 2, 3 or 4 micro-batches have equally
/// many.
Options thirty_mesh_steps(const Options& more, const std::string& model = "seed") {
  return Options{"--data", "synthetic:390:10", "--workers", "0",       "--batch-size",
                 "13",     "--order",          "sampler",   "--model", model} +
         more;
}

#ifdef LOCKSTEP_DOUBLE

/// Momentum makes a gradient that is too large or too small show in more than one step.
const Options kMomentumSgd{"--optimizer", "sgd", "--lr", "0.01", "--momentum", "0.9"};

/// Those with a pipeline of at most four stages: the seed network has four layers with parameters.
std::vector<Mesh> pipeline_meshes(const std::vector<int>& ranks) {
  std::vector<Mesh> all;
  for (const int count : ranks) {
    std::ranges::move(meshes_in_every_order(count, {"data", "shard", "tensor", "pipeline"}),
                      std::back_inserter(all));
  }
  std::erase_if(all, [](const Mesh& mesh) {
    const size_t at = mesh.axes.find("pipeline=");
    return at == std::string::npos || mesh.axes.substr(at).starts_with("pipeline=8") ||
           mesh.axes.find("tensor=8") != std::string::npos;
  });
  return all;
}

/// Each axis beside the pipeline, inside it and outside.
const std::vector<Mesh> kFewPipelines{{"pipeline=4", 4},
                                      {"pipeline=2,data=2", 4},
                                      {"shard=2,pipeline=2", 4},
                                      {"pipeline=2,tensor=2", 4}};

/// How many micro-batches, by which schedule.
const std::vector<Options> kPipelineWays{{"--accumulate", "4"},
                                         {"--accumulate", "3", "--schedule", "gpipe"},
                                         {"--accumulate", "1"},
                                         {"--accumulate", "2"},
                                         {"--accumulate", "4", "--schedule", "gpipe"}};

/// A mesh takes one way after another; with --full all of them.
void check_pipeline_meshes(const std::vector<Mesh>& meshes, const Options& options,
                           const Outcome& single) {
  size_t next = 0;
  for (const Mesh& mesh : meshes) {
    for (size_t i = 0; i < (full_campaign() && mesh.ranks <= 4 ? kPipelineWays.size() : 1); ++i) {
      const Options& way = kPipelineWays[next++ % kPipelineWays.size()];
      INFO(mesh.axes << ", " << way[1] << " micro-batches, " << way.back());
      check_same(train_on_mesh(mesh, options + way), single);
    }
  }
}

TEST_CASE("A pipeline of ranks gives stage 01's weights after 30 steps, beside any other axis",
          "[equivalence][mesh][pipeline]") {
  const std::vector<Mesh> all = full_campaign() ? pipeline_meshes({2, 4, 8}) : kFewPipelines;
  CHECK(pipeline_meshes({2}).size() == 1);
  CHECK(pipeline_meshes({4}).size() ==
        7);  // pipeline=4, and pipeline=2 before or after one of three
  for (const Options& optimizer : {kMomentumSgd, kCalmAdamW}) {
    const Options options = thirty_mesh_steps(optimizer);
    const Outcome single = train(options);
    REQUIRE(single.losses().size() == 30);
    check_pipeline_meshes(all, options, single);
  }
}

TEST_CASE("In a pipeline dropout's masks and the clipped norm are those of the whole network",
          "[equivalence][mesh][pipeline]") {
  const Options options = thirty_mesh_steps(
      kMomentumSgd + Options{"--dropout", "--clip-norm", "0.1", "--max-steps", "12"});
  check_pipeline_meshes(full_campaign() ? pipeline_meshes({2, 4, 8}) : kFewPipelines, options,
                        train(options, "04-ddp", "cpu:0"));
}

/// Ten steps of 12 samples and one of a single one: then most micro-batches have none.
TEST_CASE("Micro-batches without samples go through a pipeline, too",
          "[equivalence][mesh][pipeline]") {
  const Options options =
      kMomentumSgd + Options{"--data", "synthetic:121:10", "--workers", "0",       "--batch-size",
                             "12",     "--order",          "sampler",   "--model", "seed"};
  const Outcome single = train(options);
  for (const Mesh& mesh : {Mesh{"data=2,pipeline=2", 4}, {"pipeline=3", 3}}) {
    INFO(mesh.axes);
    check_same(train_on_mesh(mesh, options + Options{"--accumulate", "5"}), single);
  }
}

/// Ranks with other samples normalise together: so a micro-batch is that of all of them.
TEST_CASE("With BatchNorm a pipeline of ranks gives the weights of micro-batches in turn",
          "[equivalence][mesh][pipeline]") {
  const Options options = thirty_mesh_steps(kMomentumSgd, "seed-bn");
  const Outcome parts = train_in_parts(options, "micro:2");
  CHECK(relative_l2(parts.state, train(options).state) > 1e-3);  // the whole batch's are others
  std::vector<Mesh> some{{"pipeline=2,data=2", 4}, {"tensor=2,pipeline=2", 4}};
  if (full_campaign()) some = pipeline_meshes({2, 4});
  for (const Mesh& mesh : some) {
    INFO(mesh.axes);
    check_same(train_on_mesh(mesh, options + Options{"--accumulate", "2"}), parts);
  }
}

/// Two ranks with 8 samples each cut 3, 3 and 2, which are others than one rank's 6, 5 and 5.
TEST_CASE("With BatchNorm the micro-batches of ranks are normalised as the ranks cut them",
          "[equivalence][mesh][pipeline]") {
  const Options three =
      kMomentumSgd + Options{"--data", "synthetic:160:10", "--workers", "0",       "--batch-size",
                             "16",     "--order",          "sampler",   "--model", "seed-bn"};
  const Outcome cut_by_ranks = train_in_parts(three, "micro:3x2");
  CHECK(relative_l2(cut_by_ranks.state, train_in_parts(three, "micro:3").state) > 1e-3);
  check_same(train_on_mesh({"pipeline=2,data=2", 4}, three + Options{"--accumulate", "3"}),
             cut_by_ranks);
}

TEST_CASE("A perceptron and ResNet-18 as pipelines of ranks", "[equivalence][mesh][pipeline]") {
  const Options few = kCalmAdamW + Options{"--max-steps", "3", "--width", "4"};
  const Options mlp = thirty_mesh_steps(few, "mlp"), resnet = thirty_mesh_steps(few, "resnet18");
  check_same(train_on_mesh({"pipeline=5", 5}, mlp + Options{"--accumulate", "3"}), train(mlp));
  const Options two{"--accumulate", "2"};
  const Outcome parts = train_in_parts(resnet, "micro:2");
  check_same(train_on_mesh({"pipeline=4", 4}, resnet + two), parts);
  check_same(train_on_mesh({"pipeline=2,tensor=2", 4}, resnet + two), parts);
}

/// What is shared out, when it is gathered and freed, and what carries the messages.
const std::vector<Options> kStageVariations{{"--shard", "optimizer"},
                                            {"--shard", "gradients"},
                                            {"--reshard-after-forward", "no"},
                                            {"--prefetch", "0", "--unit", "model"},
                                            {"--backend", "tcp"},
                                            {"--backend", "gloo"}};

TEST_CASE("Passes of several micro-batches in turn find their units' values",
          "[equivalence][mesh][pipeline]") {
  const Options options = thirty_mesh_steps(kCalmAdamW + Options{"--max-steps", "10"});
  const Outcome single = train(options);
  for (const Options& variation : kStageVariations) {
    const bool short_campaign = variation[0] == "--reshard-after-forward" || variation[1] == "tcp";
    if (!short_campaign && !full_campaign()) continue;
    INFO(variation[0] << " " << variation[1]);
    check_same(train_on_mesh({"pipeline=2,shard=2", 4},
                             options + variation + Options{"--accumulate", "5"}),
               single);
  }
}

/// Of the network with normalisation, which has a state beside parameters.
TEST_CASE("Checkpoints of a pipeline are read by other meshes and by stage 06, and theirs by it",
          "[equivalence][mesh][pipeline]") {
  const TempDir folder;
  const Options options = thirty_mesh_steps(kCalmAdamW, "seed-bn");
  const Options half{"--max-steps", "6"}, all{"--max-steps", "12"};
  const auto resumed = [&](const std::string& file) {
    return options + all + Options{"--resume", file, "--allow-world-size-change"};
  };
  const auto saves = [&](const std::string& name) {
    return options + half + Options{"--checkpoint-dir", folder / name};
  };
  const std::string file = "/step-000000006.safetensors";
  const Outcome whole = train(options + all);
  train_on_mesh({"tensor=2,pipeline=2", 4}, saves("mesh"));  // a stage's ranks are no neighbours
  const auto check = [&](const Outcome& second) {  // it has the losses of its own steps only
    CHECK(relative_l2(second.state, whole.state) <= kApart);
    CHECK(std::abs(second.losses().back() - whole.losses().back()) <= 100 * kApart);
  };
  check(train_on_mesh({"pipeline=4", 4}, resumed(folder / ("mesh" + file))));
  check(train(resumed(folder / ("mesh" + file)), "06-fully-sharded", cpus(2)));
  train(saves("sharded"), "06-fully-sharded", cpus(2));
  check(train_on_mesh({"shard=2,pipeline=2", 4}, resumed(folder / ("sharded" + file))));
}

TEST_CASE("What a pipeline saves, any pipeline and stage 01 load",
          "[equivalence][mesh][pipeline]") {
  const TempDir folder;
  const Options options = thirty_mesh_steps(kMomentumSgd, "seed-bn");
  const Outcome saved = train_on_mesh({"pipeline=2", 2}, options + Options{"--max-steps", "4"});
  check_evaluated_as_saved(saved, options);
  write_file(folder / "weights", saved.file);
  const Outcome loaded = train_on_mesh(
      {"pipeline=4", 4}, options + Options{"--epochs", "0", "--load", folder / "weights"});
  CHECK((loaded.file == saved.file));
  CHECK(loaded.metrics.at("test_loss").back() == saved.metrics.at("test_loss").back());
}

#endif

/// Rank 0's stage is conv1 with pool1: it sends [13,12,12,10] in a step, and no gradient.
TEST_CASE("The bytes along a pipeline are those of the activations",
          "[equivalence][mesh][pipeline]") {
  const Options options =
      thirty_mesh_steps({"--mesh", "pipeline=2", "--max-steps", "4", "--accumulate", "3"});
  const nlohmann::json along =
      measure(options, kMeshStage, cpus(2)).metrics.at("along").at("pipeline");
  CHECK(along.at("ranks") == 2);
  CHECK(along.at("sent") == 13 * 12 * 12 * 10 * sizeof(Real));
  CHECK(along.at("predicted") == along.at("sent"));
}

void check_pipeline_refused(const Options& options, const Words& fragments) {
  check_stage_refuses(Options{"--model", "seed"} + options, fragments, {}, kMeshStage);
}

TEST_CASE("Pipelines that cannot be are refused in one line", "[equivalence][mesh][pipeline]") {
  check_pipeline_refused(
      {"--devices", cpus(5), "--mesh", "pipeline=5"},
      {"--mesh pipeline=5", "network's 4 layers with parameters", "give at most that number"});
  check_pipeline_refused({"--devices", cpus(2), "--mesh", "data=2", "--schedule", "gpipe"},
                         {"--schedule", "--mesh data=2 has none"});
  for (const std::string schedule : {"zero-bubble", "interleaved", "naive"}) {
    check_pipeline_refused(
        {"--devices", cpus(2), "--mesh", "pipeline=2", "--schedule", schedule},
        {fmt::format("--schedule: found '{}', expected gpipe or 1f1b\n", schedule)});
  }
  check_pipeline_refused({"--devices", cpus(3), "--mesh", "pipeline=2"},
                         {"--mesh pipeline=2: has 2 ranks, expected 3"});
}

/// Where the last stage's scores are not finite, the first one's own numbers may still be.
TEST_CASE("A loss that is not finite stops all stages in the same step",
          "[equivalence][mesh][pipeline]") {
  const Options options = thirty_mesh_steps(
      {"--width", "8", "--optimizer", "sgd", "--lr", "1e12", "--accumulate", "2"}, "mlp");
  for (const std::string shape : {"pipeline=2,data=2", "tensor=1,pipeline=4"}) {
    const TempDir folder;
    const ProcessResult run = run_process(Options{stage_binary(kMeshStage), "--devices", cpus(4),
                                                  "--mesh", shape, "--save", folder / "weights"} +
                                              options,
                                          kDeadline);
    INFO(story(run));
    CHECK_FALSE(run.timed_out);
    CHECK(run.status == 1);
    CHECK(run.err.starts_with("error: step "));
    CHECK(run.err.find('\n') == run.err.size() - 1);
    CHECK_THAT(run.err, ContainsSubstring("rank 3 (cpu:3, pipeline "));
    CHECK(folder.names() == Words{});
  }
}

}  // namespace
}  // namespace lockstep
