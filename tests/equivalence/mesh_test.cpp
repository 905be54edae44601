// Stage 07 leads to stage 01's weights: on every mesh of ranks.

#include <iterator>
#include <set>

#include "05-syncbn-checkpoint/checkpoint.h"
#include "tests/equivalence/meshes.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;

const Options kMomentum{"--optimizer", "sgd", "--lr", "0.01", "--momentum", "0.9"};

double bound(const Options& optimizer) {
  return kDouble ? kApart : optimizer == kMomentum ? 1e-5 : 1e-4;
}

/// Of the seed network, whose layers divide by 2 and 4 along `tensor`.
std::vector<Mesh> seed_meshes(const std::vector<int>& worlds) {
  std::vector<Mesh> all;
  for (const int ranks : worlds) {
    std::ranges::move(meshes_in_every_order(ranks, {"data", "shard", "tensor"}),
                      std::back_inserter(all));
  }
  std::erase_if(all, [](const Mesh& mesh) { return mesh.axes.find("tensor=8") != mesh.axes.npos; });
  return all;
}

/// By default one in which each pair of axes is longer than 1, and a whole one.
std::vector<Mesh> some_meshes() {
  return {{"data=2,shard=2", 4}, {"tensor=2,data=2", 4}, {"shard=2,data=2,tensor=2", 8}};
}

/// 30 steps of 13 samples, the last of 10: no number of ranks from 2 on divides them evenly.
const Options kSteps{"--data", "synthetic:387:10", "--workers", "0", "--batch-size",
                     "13",     "--order",          "sampler"};

/// A perceptron of nine layers, of which eight have 24 features: their number divides by all these
/// numbers of ranks.
const Options kDeepPerceptron{"--model", "mlp", "--depth", "9", "--width", "6"};

/// How a mesh takes its batch: micro-batches, with a pipeline in turns.
Options way_of(const Mesh& mesh, size_t number) {
  const Options micro_batches{"--accumulate", std::to_string(1 + number % 4)};
  const bool pipeline = mesh.axes.find("pipeline=") != mesh.axes.npos &&
                        mesh.axes.find("pipeline=1") == mesh.axes.npos;
  if (!pipeline) return micro_batches;
  return micro_batches + Options{"--schedule", number % 3 == 0 ? "gpipe" : "1f1b"};
}

/// By default each axis at 3 or 8 ranks and beside each other one; with --full all.
TEST_CASE("A mesh of any size gives stage 01's weights after 30 steps", "[equivalence][mesh]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  std::vector<Mesh> meshes = meshes_of_every_size();
  CHECK(meshes.size() == 55);
  if (!full_campaign()) {
    meshes = {{"pipeline=8", 8},          {"tensor=3,data=2", 6},  {"shard=3,pipeline=2", 6},
              {"pipeline=3,tensor=2", 6}, {"shard=2,tensor=4", 8}, {"data=4,pipeline=2", 8}};
  }
  size_t number = 0;
  for (const Options& optimizer : {kMomentum, kCalmAdamW}) {
    const Options options = kSteps + optimizer + kDeepPerceptron;
    const Outcome single = train(options);
    REQUIRE(single.losses().size() == 30);
    for (const Mesh& mesh : meshes) {
      const Options way = way_of(mesh, number++);
      INFO(optimizer[1] << ", " << mesh.axes << ", " << way[1] << " micro-batches");
      check_same(train_on_mesh(mesh, options + way), single, bound(optimizer));
    }
  }
}

TEST_CASE("A mesh gives stage 01's weights in any order of its axes", "[equivalence][mesh]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  for (const Options& optimizer : {kMomentum, kCalmAdamW}) {
    const Options options = kSteps + optimizer + Options{"--model", "seed"};
    const Outcome single = train(options);
    for (const Mesh& mesh : full_campaign() ? seed_meshes({2, 4, 8}) : some_meshes()) {
      INFO(optimizer[1] << ", " << mesh.axes);
      const Outcome several = train_on_mesh(mesh, options);
      check_same(several, single, bound(optimizer));
      if (mesh.axes.find("tensor") != mesh.axes.npos) continue;
      // Ranks that all train on the same samples get these weights, too, by more work.
      CHECK(several.metrics.at("training_flops") == single.metrics.at("training_flops"));
    }
  }
}

TEST_CASE("A mesh gives stage 01's weights in every build", "[equivalence][mesh]") {
  const Options options = kSteps + Options{"--optimizer", "sgd", "--lr", "0.01", "--model", "seed"};
  check_same(train_on_mesh({"data=2,tensor=2", 4}, options), train(options),
             kDouble ? kApart : 1e-5);
}

#ifndef LOCKSTEP_DOUBLE  // which has no other precision
/// The scale of fp16 grows after every second good step, so that gradients overflow in some: most
/// of them in one rank's part of the network only.
TEST_CASE("In 16 bits the ranks of a mesh skip the same steps, and lead to stage 06's weights",
          "[equivalence][mesh][sixteen]") {
  for (const Options& type : {Options{"bf16"}, Options{"fp16", "--growth-interval", "2"}}) {
    const Options options =
        kSteps + Options{"--optimizer", "sgd",         "--lr",       "0.01",         "--model",
                         "seed",        "--clip-norm", "1000",       "--accumulate", "2",
                         "--max-steps", "20",          "--precision"} +
        type;
    const Outcome one = train(options, "06-fully-sharded"),
                  two = train(options, "06-fully-sharded", cpus(2));
    const std::vector<std::pair<Mesh, double>> meshes{{{"shard=2", 2}, 0},
                                                      {{"pipeline=4", 4}, 0},
                                                      {{"tensor=2", 2}, 0.01},
                                                      {{"tensor=2,pipeline=2,data=2", 8}, 0.01}};
    for (const auto& [mesh, tolerance] : meshes) {
      INFO(type[0] << ", " << mesh.axes);
      const Outcome found = train_on_mesh(mesh, options);
      // Two ranks with other samples have gradients of means of fewer: those overflow sooner.
      const bool halves = mesh.axes.find("data") != mesh.axes.npos || mesh.axes == "shard=2";
      const Outcome& expected = halves ? two : one;
      CHECK(relative_l2(found.state, expected.state) <= tolerance);
      if (type[0] == "bf16") continue;
      CHECK(found.metrics.at("loss_scale") == expected.metrics.at("loss_scale"));
      CHECK(!found.metrics.at("loss_scale").at("skipped_steps").empty());
    }
  }
}

TEST_CASE("In 16 bits a pipeline's ranks evaluate a network that ends with plain scores",
          "[equivalence][mesh][sixteen]") {
  for (const std::string type : {"bf16", "fp16"}) {
    INFO(type);
    const Options options =
        kSteps + Options{"--model", "mlp",         "--width", "4",           "--accumulate",
                         "2",       "--max-steps", "3",       "--precision", type};
    const Outcome one = train(options, "06-fully-sharded"),
                  found = train_on_mesh({"pipeline=2", 2}, options);
    CHECK(relative_l2(found.state, one.state) == 0);
    CHECK(found.metrics.at("test_loss") == one.metrics.at("test_loss"));
    CHECK(found.metrics.at("accuracy") == one.metrics.at("accuracy"));
  }
}
#endif

TEST_CASE("On a mesh clipping, micro-batches and dropout are those of one whole batch",
          "[equivalence][mesh]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  for (const Options& optimizer : {kMomentum, kCalmAdamW}) {
    const Options options =
        kSteps + optimizer +
        Options{"--model", "seed", "--dropout", "--clip-norm", "0.1", "--max-steps", "10"};
    const Outcome whole = train(options, "04-ddp", "cpu:0");
    for (const Mesh& mesh : full_campaign() ? seed_meshes({2, 4, 8}) : some_meshes()) {
      INFO(optimizer[1] << ", " << mesh.axes);
      check_same(train_on_mesh(mesh, options + Options{"--accumulate", "2"}), whole,
                 bound(optimizer));
    }
  }
}

TEST_CASE("On a mesh every way of sharding leads to the same weights", "[equivalence][mesh]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options =
      kSteps + kCalmAdamW + Options{"--model", "seed", "--max-steps", "10", "--clip-norm", "0.1"};
  const Outcome whole = train(options, "04-ddp", "cpu:0");
  for (const std::string way : {"none", "optimizer", "gradients"}) {
    if (way == "gradients" && !full_campaign()) continue;
    INFO(way);
    check_same(train_on_mesh({"data=2,shard=2,tensor=2", 8}, options + Options{"--shard", way}),
               whole, bound(kCalmAdamW));
  }
}

TEST_CASE("On a mesh a layer that every second step leaves out stays as it is",
          "[equivalence][mesh]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  for (const Options& optimizer :
       {kMomentum + Options{"--weight-decay", "0.5"},
        Options{"--optimizer", "adamw", "--weight-decay", "0.5", "--eps", "1e-3"}}) {
    const Options options =
        kSteps + optimizer + Options{"--model", "seed-skip", "--max-steps", "6"};
    const Outcome single = train(options);
    for (const std::string axes : {"data=2,shard=2", "tensor=2,data=2", "shard=2,pipeline=2"}) {
      INFO(optimizer[1] << ", " << axes);
      check_same(train_on_mesh({axes, 4}, options), single, bound(kCalmAdamW));
    }
  }
}

/// Ten steps of 12 samples and one of a single sample, which leaves ranks without any.
TEST_CASE("On a mesh batches are normalised over all ranks with other samples",
          "[equivalence][mesh]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options{
      "--data",  "synthetic:121:10", "--workers", "0",           "--batch-size", "12",   "--order",
      "sampler", "--model",          "seed-bn",   "--optimizer", "sgd",          "--lr", "0.01"};
  const Outcome single = train(options);
  for (const Mesh& mesh : full_campaign() ? seed_meshes({2, 4}) : some_meshes()) {
    INFO(mesh.axes);
    const Outcome several = train_on_mesh(mesh, options);
    CHECK(relative_l2(several.state, single.state) <= (kDouble ? 1e-10 : 1e-3));
  }
}

/// Each of four ranks has running statistics of its own until it evaluates: with rank 0's.
TEST_CASE("Ranks of a mesh that normalise by themselves evaluate the network that is saved",
          "[equivalence][mesh]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options = kSteps + Options{"--model", "seed-bn"};
  check_evaluated_as_saved(
      train_on_mesh({"data=2,shard=2", 4},
                    options + kMomentum + Options{"--no-sync-bn", "--max-steps", "3"}),
      options);
}

TEST_CASE("ResNet-18 and the mlp on a mesh give stage 01's weights", "[equivalence][mesh]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  for (const auto& [model, meshes] : std::vector<std::pair<Options, std::vector<Mesh>>>{
           {{"--model", "resnet18", "--width", "6"},
            {{"shard=2,tensor=2", 4}, {"data=2,tensor=3", 6}, {"data=2,shard=2,tensor=2", 8}}},
           {{"--model", "mlp", "--width", "4"},
            {{"data=2,tensor=2", 4}, {"tensor=2,shard=2,data=2", 8}}}}) {
    const Options options = kSteps + kMomentum + model + Options{"--max-steps", "3"};
    const Outcome single = train(options);
    for (const Mesh& mesh : meshes) {
      if (!full_campaign() && &mesh != &meshes.front()) continue;
      INFO(model[1] << ", " << mesh.axes);
      const Outcome several = train_on_mesh(mesh, options);
      CHECK(relative_l2(several.state, single.state) <= (kDouble ? 1e-11 : 1e-4));
    }
  }
}

/// What is saved has the whole network's names and shapes, bit by bit as it was loaded.
TEST_CASE("Any mesh loads what any other has saved", "[equivalence][mesh]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const TempDir folder;
  const Options options = kSteps + kMomentum + Options{"--model", "seed-bn", "--max-steps", "3"};
  const Outcome first = train_on_mesh({"data=2,tensor=2", 4}, options);
  write_file(folder / "weights", first.file);
  const Options load{"--load", folder / "weights", "--epochs", "0"};
  const Outcome other =
      train_on_mesh({"tensor=2,shard=2", 4}, kSteps + Options{"--model", "seed-bn"} + load);
  CHECK((other.file == first.file));
  check_evaluated_as_saved(first, kSteps + Options{"--model", "seed-bn"});
}

TEST_CASE("A run resumes on another mesh, and in stage 06, up to rounding",
          "[equivalence][mesh][checkpoint]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  struct Part {
    std::string stage;
    Mesh mesh;
    int64_t steps;
  };
  const Options options = kSteps + kCalmAdamW + Options{"--model", "seed-bn"};
  const Outcome straight = train(options + Options{"--max-steps", "9"});
  const std::vector<std::vector<Part>> ways{{{"07-mesh", {"shard=2,tensor=2", 4}, 3},
                                             {"07-mesh", {"data=2,shard=2,tensor=2", 8}, 6},
                                             {"06-fully-sharded", {"", 2}, 9}},
                                            {{"06-fully-sharded", {"", 3}, 3},
                                             {"07-mesh", {"tensor=4", 4}, 6},
                                             {"07-mesh", {"data=3", 3}, 9}}};
  for (const std::vector<Part>& way : ways) {
    if (&way != &ways.front() && !full_campaign()) continue;
    const TempDir saved;
    Outcome last;
    for (const Part& part : way) {
      INFO(part.stage << " " << part.mesh.axes);
      Options more{"--checkpoint-dir",
                   saved.path(),
                   "--resume",
                   "auto",
                   "--allow-world-size-change",
                   "--max-steps",
                   std::to_string(part.steps)};
      if (!part.mesh.axes.empty()) more = more + Options{"--mesh", part.mesh.axes};
      last = train(options + more, part.stage, cpus(part.mesh.ranks));
    }
    CHECK(relative_l2(last.state, straight.state) <= bound(kCalmAdamW));
    const std::vector<double> losses = straight.losses();
    CHECK(largest(difference(last.losses(), {losses.end() - 3, losses.end()})) <=
          100 * bound(kCalmAdamW));
  }
}

/// By default stage 05 goes on with one rank from stage 06, with two from a mesh.
TEST_CASE("Stage 05 goes on from joined shards with the optimizer's state, up to rounding",
          "[equivalence][mesh][sharded][checkpoint]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  constexpr int64_t kSaved = 5, kAll = 9;
  const auto until = [](int64_t steps) { return Options{"--max-steps", std::to_string(steps)}; };
  for (const Options& optimizer : {kMomentum, kCalmAdamW}) {
    const Options options = kSteps + optimizer + Options{"--model", "seed-bn"};
    const Outcome straight = train(options + until(kAll));
    for (const Mesh& before : {Mesh{"", 2}, Mesh{"data=2,tensor=2", 4}}) {
      const TempDir folder;
      const Options saving =
          options + until(kSaved) + Options{"--checkpoint-dir", folder / "shards"};
      before.axes.empty() ? train(saving, "06-fully-sharded", cpus(2))
                          : train_on_mesh(before, saving);
      const ProcessResult joined = run_process(
          {build_dir() + "/06-fully-sharded/join-weights",
           checkpoint_path(folder / "shards", kSaved), "--checkpoint-dir", folder / "whole"},
          kDeadline);
      INFO(story(joined));
      REQUIRE(joined.status == 0);
      for (const int ranks : {1, 2}) {
        if (ranks == (before.axes.empty() ? 2 : 1) && !full_campaign()) continue;
        INFO(optimizer[1] << ", from " << before.axes << " to " << ranks << " ranks");
        const Outcome last =
            train(options + until(kAll) +
                      Options{"--resume", checkpoint_path(folder / "whole", kSaved),
                              "--allow-world-size-change"},
                  "05-syncbn-checkpoint", cpus(ranks));
        CHECK(relative_l2(last.state, straight.state) <= bound(optimizer));
        const std::vector<double> losses = straight.losses();
        CHECK(largest(difference(last.losses(), {losses.begin() + kSaved, losses.end()})) <=
              100 * bound(optimizer));
      }
    }
  }
}

/// The metrics of four steps.
nlohmann::json some_steps(const Mesh& mesh, const Options& options) {
  return measure(kSteps + options + Options{"--max-steps", "4", "--mesh", mesh.axes}, "07-mesh",
                 cpus(mesh.ranks))
      .metrics;
}

/// HSDP sends whole gradients within a group of shards only; across groups, a shard's.
TEST_CASE("What a rank sends along each axis is what the formulas say", "[equivalence][mesh]") {
  const auto sent = [](const Mesh& mesh) { return some_steps(mesh, {"--model", "seed"}); };
  const nlohmann::json hybrid = sent({"data=2,shard=2", 4}), split = sent({"data=2,tensor=2", 4});
  const double padded = 21'840 * sizeof(Real);  // and padding below 1 %
  const nlohmann::json& along_data = hybrid.at("along").at("data");
  CHECK(along_data.at("sent") == along_data.at("predicted"));
  CHECK(along_data.at("sent").get<double>() == Approx(padded / 2).epsilon(0.02));
  CHECK(hybrid.at("bytes_per_step").at("sent").get<double>() ==
        Approx(3 * padded / 2).epsilon(0.02));
  const nlohmann::json& along_tensor = split.at("along").at("tensor");
  CHECK(along_tensor.at("sent").get<double>() ==
        Approx(along_tensor.at("predicted").get<double>()).epsilon(1e-3));
  // Where ranks with other samples are along one axis alone, or shards first, it is stage 06's.
  const auto is_stage06s = [](const nlohmann::json& run, const char* axis) {
    const nlohmann::json &along = run.at("along").at(axis), &all = run.at("bytes_per_step");
    return along.at("sent") == all.at("sent") && along.at("predicted") == all.at("predicted");
  };
  CHECK(is_stage06s(hybrid, "shard"));
  CHECK(is_stage06s(split, "data"));
}

/// In shared memory small sums go whole to every other rank: of more than two ranks, that is more
/// than round a ring.
TEST_CASE("With any number of ranks an axis sends what its formula says", "[equivalence][mesh]") {
  for (const std::string backend : {"shm", "tcp"}) {
    for (const std::string model : {"seed", "mlp"}) {
      for (const int ranks : {2, 4, 8}) {
        if (backend == "tcp" && ranks == 2 && !full_campaign()) continue;
        const Mesh mesh{fmt::format("tensor={}", ranks), ranks};
        INFO(backend << ", " << model << ", " << mesh.axes);
        const nlohmann::json run = some_steps(mesh, {"--model", model, "--backend", backend});
        const nlohmann::json& along = run.at("along").at("tensor");
        CHECK(along.at("sent") == along.at("predicted"));
        CHECK(along.at("sent") > 0);
      }
    }
  }
  for (const std::string axes : {"data=4", "shard=2,data=4"}) {
    INFO(axes);
    const Mesh mesh{axes, axes == "data=4" ? 4 : 8};
    const nlohmann::json run = some_steps(mesh, {"--model", "seed", "--backend", "shm"});
    const nlohmann::json& along = run.at("along").at("data");
    CHECK(along.at("sent") == along.at("predicted"));
  }
}

/// A pipeline's first rank knows of all stages' layers.
TEST_CASE("The summary names the layers that tensor does not divide", "[equivalence][mesh]") {
  const auto check = [](const Mesh& mesh, const Options& options, const std::string& row,
                        const nlohmann::json& layers) {
    INFO(mesh.axes);
    const Outcome run = measure(kSteps + options + Options{"--max-steps", "2", "--mesh", mesh.axes},
                                "07-mesh", cpus(mesh.ranks));
    CHECK_THAT(run.out, Catch::Matchers::ContainsSubstring("split layers") &&
                            Catch::Matchers::ContainsSubstring(row));
    CHECK(run.metrics.at("split_layers") == layers);
  };
  const Options seed{"--model", "seed"};
  const nlohmann::json halves{{"split", {"conv2", "fc1"}}, {"copied", {"conv1", "fc2"}}};
  const std::string two = " 2 of 4; copies on all ranks along tensor: conv1, fc2\n";
  check({"tensor=2", 2}, seed, two, halves);
  check({"pipeline=2,tensor=2", 4}, seed, two, halves);
  check({"tensor=8", 8}, seed, " 1 of 4; copies on all ranks along tensor: conv1, conv2, fc2\n",
        {{"split", {"fc1"}}, {"copied", {"conv1", "conv2", "fc2"}}});
  // A layer of its own that works on a rank's channels is split, too.
  check({"tensor=2", 2}, {"--model", "seed-bn"},
        " 3 of 6; copies on all ranks along tensor: conv1, bn1, fc2\n",
        {{"split", {"conv2", "bn2", "fc1"}}, {"copied", {"conv1", "bn1", "fc2"}}});
}

/// Waiting along data and shard is what stage 06 calls exposed; along tensor it is within compute.
TEST_CASE("The summary has the time that passes wait along each axis", "[equivalence][mesh]") {
  const Outcome run = measure(
      kSteps + Options{"--model", "seed", "--max-steps", "8", "--mesh", "data=2,shard=2,tensor=2"},
      "07-mesh", cpus(8));
  const nlohmann::json &mesh = run.metrics.at("along"), &times = run.metrics.at("per_step_seconds");
  const auto waited = [&](const char* axis) {
    return mesh.at(axis).at("waited_seconds_per_step").get<double>();
  };
  CHECK(mesh.size() == 3);
  CHECK_THAT(run.out, Catch::Matchers::ContainsSubstring(
                          ", data=2,shard=2,tensor=2: global batch 13 = 4 x at most 4 samples; "));
  for (const char* axis : {"data", "shard", "tensor"}) {
    INFO(axis);
    CHECK(waited(axis) > 0);
    CHECK_THAT(run.out, Catch::Matchers::ContainsSubstring(fmt::format("along {}", axis)));
  }
  CHECK(waited("data") + waited("shard") ==
        Approx(times.at("exposed_communication").get<double>()).epsilon(1e-9));
  CHECK(waited("tensor") <= times.at("compute").get<double>());
  CHECK(mesh.at("tensor").at("queued_seconds_per_step").get<double>() <= waited("tensor"));
  CHECK_THAT(run.out, Catch::Matchers::ContainsSubstring(
                          "ms of it before its sums began: behind other messages, and from thread "
                          "to thread"));
}

TEST_CASE("A trace says along which axes a message goes", "[equivalence][mesh]") {
  const TempDir folder;
  measure(kSteps + Options{"--model", "seed", "--max-steps", "2", "--mesh",
                           "data=2,shard=2,tensor=2", "--trace", folder / "trace"},
          "07-mesh", cpus(8));
  std::set<std::string> found;
  const nlohmann::json trace = read_json(folder / "trace");
  for (const nlohmann::json& slice : trace.at("traceEvents")) {
    if (slice.at("ph") != "X") continue;
    const std::string layer = slice.at("args").at("layer");
    const size_t range = layer.find("along ");
    const std::string name = slice.at("name");
    const bool message = name.starts_with("all_") || name.starts_with("reduce_scatter");
    INFO(name << " in " << layer);
    CHECK(message == (range != std::string::npos && name != "broadcast"));
    if (message) found.insert(name + " " + layer.substr(range));
  }
  for (const char* message : {"all_gather along shard", "reduce_scatter along shard",
                              "all_reduce along data", "all_reduce along tensor"}) {
    INFO(message);
    CHECK(found.contains(message));
  }
}

/// So that their times can be compared.
TEST_CASE("By hand as many bytes are sent along each axis as in a step", "[equivalence][mesh]") {
  for (const std::string mesh :
       {"data=2,shard=2", "data=2,tensor=2", "shard=2,tensor=2", "data=2,pipeline=2"}) {
    INFO(mesh);
    Options options{"--model",      "seed", "--data", "synthetic:48:10",
                    "--batch-size", "16",   "--lr",   "0.01",
                    "--max-steps",  "3",    "--mesh", mesh,
                    "--accumulate", "2"};
    const nlohmann::json stage = measure(options, "07-mesh", cpus(4)).metrics.at("along"),
                         by_hand = measure(options, "07-mesh/mesh-messages", cpus(4)).metrics;
    CHECK(by_hand.size() == stage.size());
    for (const auto& [axis, row] : stage.items()) {
      INFO(axis);
      CHECK(by_hand.at(axis).at("sent") == row.at("sent"));
      CHECK(by_hand.at(axis).at("seconds_per_step") > 0);
    }
  }
}

/// Simulated ranks have cores of their own, so a step waits for messages only. A sum along tensor
/// also waits behind messages of another axis; those are then waited for no more. Messages with
/// kernels launched between them take up to a hundredth longer.
TEST_CASE("A step waits no longer for messages than they take by hand", "[equivalence][mesh]") {
  const auto seconds = [](const nlohmann::json& along, const char* key) {
    double sum = 0;
    for (const nlohmann::json& axis : along) sum += axis.at(key).get<double>();
    return sum;
  };
  for (const auto& [devices, hosts] :
       {std::pair("sim:h100x4", "1"), std::pair("sim:laptopx2", "2")}) {
    for (const char* model : {"mlp", "resnet18"}) {
      for (const char* mesh : {"data=2,shard=2", "data=2,tensor=2", "shard=2,tensor=2"}) {
        INFO(hosts << " x " << devices << ", " << model << ", " << mesh);
        const Options options{"--nodes",      hosts, "--model",     model, "--data", "blank:320:64",
                              "--batch-size", "64",  "--max-steps", "4",   "--mesh", mesh,
                              "--no-sync-bn"};
        const nlohmann::json step = measure(options, "07-mesh", devices).metrics.at("along"),
                             by_hand = measure(options, "07-mesh/mesh-messages", devices).metrics;
        CHECK(seconds(step, "waited_seconds_per_step") > 0);
        CHECK(seconds(step, "waited_seconds_per_step") <=
              1.01 * seconds(by_hand, "seconds_per_step"));
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
