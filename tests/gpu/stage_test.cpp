// Training on a GPU: the same gradients and losses as on the CPU, graphs, and stage 01's program.

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <utility>

#include "05-syncbn-checkpoint/checkpoint.h"
#include "common/comm/nccl_communicator.h"
#include "common/data/synthetic.h"
#include "common/kernels/cuda/cuda.h"
#include "tests/gpu/gpu_test_support.h"
#include "tests/support/data_test_files.h"
#include "tests/support/empty_pass.h"
#include "tests/support/json.h"
#include "tests/support/stage.h"
#include "tests/support/training.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;
using Numbers = std::vector<double>;

Numbers values_of(const Tensor& tensor) {
  const std::vector<Real> values = tensor.to_host();
  return {values.begin(), values.end()};
}

// --- Empty batches -------------------------------------------------------------------------------

TEST_CASE("A pass without samples reaches every layer on a GPU and changes nothing",
          "[cuda][stage][row90]") {
  LOCKSTEP_NEEDS_GPU();
  const auto device = open_device(kGpu, {});
  const Stream stream = device->create_stream("compute");
  for (const ModelOptions& options : networks_for_empty_passes()) {
    INFO("model " << int(options.kind));
    CHECK_NOTHROW(require_empty_pass(stream, options));
  }
}

// --- Checkpoints ---------------------------------------------------------------------------------

/// What a checkpoint keeps of a training.
std::vector<std::vector<Real>> kept(Training& training) {
  std::vector<std::vector<Real>> all{training.parameters.values().to_host(),
                                     training.parameters.buffer_values().to_host()};
  for (const OptimizerState& state : training.optimizer.state()) {
    all.push_back(state.ranges.at(0).to_host());
  }
  return all;
}

TEST_CASE("A checkpoint goes from a GPU to the CPU, back, and to another GPU",
          "[cuda][stage][row120]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  const int64_t batch = thorough() ? 32 : 8;
  const Dataset set = make_synthetic(SyntheticPart::train, 2 * batch);
  const TrainingOptions options{
      .model = {.kind = ModelKind::seed_bn}, .rule = {.momentum = 0.9}, .batch_size = batch};
  const TempDir folder;
  const auto passes_to = [&](Stream from, Stream to) {
    Training saved(from, set, options), restored(to, set, options);
    saved.epoch();
    save_checkpoint(folder.path(), {*saved.model.network, saved.parameters, saved.optimizer}, {});
    restore(read_checkpoint(checkpoint_path(folder.path(), 0)),
            {*restored.model.network, restored.parameters, restored.optimizer});
    CHECK(kept(saved) == kept(restored));
    CHECK(restored.first_loss() == Approx(saved.first_loss()).epsilon(1e-4));
  };
  passes_to(both.gpu, both.cpu);
  passes_to(both.cpu, both.gpu);
  if (cuda::availability().devices < 2) return;
  const std::unique_ptr<Device> second = open_device({DeviceId::Kind::cuda, 1}, {});
  const Stream stream = second->create_stream("second");
  const int64_t before = both.gpu_device->memory().current();
  passes_to(both.cpu, stream);
  CHECK(both.gpu_device->memory().current() == before);
}

// --- Beside the CPU ------------------------------------------------------------------------------

TEST_CASE("The first gradients of the seed networks on a GPU are those of the CPU",
          "[cuda][stage][row20]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const ModelKind kind : {ModelKind::seed, ModelKind::seed_bn}) {
    for (const bool dropout : {false, true}) {
      for (const int64_t batch : {thorough() ? 64 : 16, 5}) {
        INFO((kind == ModelKind::seed ? "seed" : "seed-bn")
             << ", dropout " << dropout << ", batch " << batch);
        const Dataset set = make_synthetic(SyntheticPart::train, batch);
        const TrainingOptions options{.model = {.kind = kind, .dropout = dropout},
                                      .batch_size = batch};
        Training gpu(both.gpu, set, options), cpu(both.cpu, set, options);
        CHECK(relative_l2(gpu.epoch(), cpu.epoch()) <= 1e-5);
        const Numbers gradient = values_of(cpu.parameters.gradients());
        CHECK(l2(gradient) > 0.1);
        CHECK(relative_l2(values_of(gpu.parameters.gradients()), gradient) <= 1e-4);
      }
    }
  }
}

TEST_CASE("The first ten losses of the seed network on a GPU are those of the CPU",
          "[cuda][stage][row20]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  const TrainingOptions options{.batch_size = thorough() ? 32 : 8};
  const Dataset set = make_synthetic(SyntheticPart::train, 10 * options.batch_size);
  Training gpu(both.gpu, set, options), cpu(both.cpu, set, options);
  const Numbers found = gpu.epoch(), expected = cpu.epoch();
  REQUIRE(found.size() == 10);
  REQUIRE(expected.size() == 10);
  for (size_t step = 0; step < 10; ++step) {
    INFO("step " << step);
    CHECK(found[step] == Approx(expected[step]).epsilon(1e-4));
  }
  CHECK(expected.front() != expected.back());
}

TEST_CASE("In 16 bits the first losses on a GPU are near the CPU's, and those of a graph the same",
          "[cuda][stage][sixteen]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const Precision precision : {Precision::bf16, Precision::fp16}) {
    INFO(name_of(precision));
    TrainingOptions options{.model = {.kind = ModelKind::seed_bn, .dropout = true},
                            .rule = {.growth_interval = precision == Precision::fp16 ? 3 : 0},
                            .batch_size = thorough() ? 32 : 8,
                            .precision = precision};
    const Dataset set = make_synthetic(SyntheticPart::train, 6 * options.batch_size);
    Training gpu(both.gpu, set, options), cpu(both.cpu, set, options);
    const Numbers found = gpu.epoch(), expected = cpu.epoch();
    REQUIRE(found.size() == 6);
    CHECK(relative_l2(found, expected) <= 1e-2);  // bf16 has 2.4 digits
    const Health health = gpu.optimizer.health().to_host()[0];
    CHECK(health.scale == cpu.optimizer.health().to_host()[0].scale);
    options.graph = true;
    Training graph(both.gpu, set, options);
    CHECK(graph.epoch() == found);
    CHECK(values_of(graph.parameters.values()) == values_of(gpu.parameters.values()));
  }
}

TEST_CASE("The first loss of ResNet-18 on a GPU is that of the CPU", "[cuda][stage][row20]") {
  LOCKSTEP_NEEDS_GPU();
  const Both both;
  for (const auto& [width, batch] : {std::pair<int64_t, int64_t>{8, 16}, {64, 4}}) {
    if (width == 64 && !thorough()) continue;
    INFO("width " << width);
    const Dataset set = make_synthetic(SyntheticPart::train, batch);
    const TrainingOptions options{.model = {.kind = ModelKind::resnet18, .width = width},
                                  .batch_size = batch};
    const double found = Training(both.gpu, set, options).first_loss();
    const double expected = Training(both.cpu, set, options).first_loss();
    CHECK(expected > 1);
    CHECK(found == Approx(expected).epsilon(1e-5));
  }
}

// --- The program ---------------------------------------------------------------------------------

struct Outcome {
  nlohmann::json metrics;
  std::string weights;  // the bytes of the file
  Weights state;        // what they mean
  Numbers losses() const { return metrics.at("losses").get<Numbers>(); }
};

Outcome train(const Words& options, const std::string& devices = "cuda:0",
              const std::string& stage = "01-single-gpu") {
  const TempDir folder;
  const Words program{stage_binary(stage), "--devices", devices};
  const Words outputs{"--save", folder / "weights", "--metrics", folder / "metrics"};
  const ProcessResult run = run_process(program + outputs + options, kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  return {read_json(folder / "metrics"), read_text(folder / "weights"),
          read_weights(folder / "weights")};
}

TEST_CASE("A step as one graph gives the bytes of the step that is enqueued",
          "[cuda][stage][graph][row126]") {
  LOCKSTEP_NEEDS_GPU();
  // Two epochs of some full batches and a short one, at a rate that changes.
  const Words small = thorough() ? Words{"--data", "synthetic:104:16", "--batch-size", "32"}
                                 : Words{"--data", "synthetic:28:8", "--batch-size", "8"};
  const Words few{"--data", "synthetic:40:8", "--batch-size", "16"};
  const Words rates{"--epochs", "2", "--lr-step", "1", "--lr", "0.05", "--momentum", "0.9"};
  std::vector<Words> cases{small + Words{"--dropout"}, small + Words{"--model", "seed-bn"}};
  if (thorough()) cases.push_back(few + Words{"--model", "resnet18", "--width", "8"});
  for (const Words& options : cases) {
    INFO(fmt::format("{}", fmt::join(options, " ")));
    const Outcome eager = train(options + rates);
    const Outcome graph = train(options + rates + Words{"--graph"});
    CHECK(graph.losses() == eager.losses());
    CHECK((graph.weights == eager.weights));
    CHECK(graph.metrics.at("test_loss") == eager.metrics.at("test_loss"));
    CHECK(graph.metrics.at("training_flops") == eager.metrics.at("training_flops"));
  }
}

TEST_CASE("With --graph the trace of a GPU shows one operation per full step but the first",
          "[cuda][stage][graph][row126]") {
  LOCKSTEP_NEEDS_GPU();
  const TempDir folder;
  train(
      {"--data", "synthetic:104:16", "--batch-size", "32", "--graph", "--trace", folder / "trace"});
  int64_t graphs = 0, updates = 0;
  const nlohmann::json trace = read_json(folder / "trace");
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    graphs += event.value("name", "") == "graph";
    updates += event.value("name", "") == "sgd_update";
  }
  CHECK(graphs == 2);
  CHECK(updates == 2);  // the first step, and the short batch
}

/// Mean of a quarter of the steps.
double mean_loss(const Numbers& losses, size_t quarter) {
  const auto begin = losses.begin() + static_cast<std::ptrdiff_t>(losses.size() / 4 * quarter);
  const auto end = begin + static_cast<std::ptrdiff_t>(losses.size() / 4);
  return std::accumulate(begin, end, 0.0) / double(losses.size() / 4);
}

TEST_CASE("The seed network learns on a GPU", "[cuda][stage][row16]") {
  LOCKSTEP_NEEDS_GPU();
  if (is_model(*open_device(kGpu, {}))) {  // no time for an epoch of 60000 images there
    const Outcome outcome =
        train(full_campaign() ? Words{"--data", "synthetic:2048:512"}
                              : Words{"--data", "synthetic:512:128", "--lr", "0.02", "--momentum",
                                      "0.9", "--batch-size", "16"});
    REQUIRE(outcome.losses().size() == 32);
    CHECK(mean_loss(outcome.losses(), 0) > 2);
    CHECK(mean_loss(outcome.losses(), 3) < 1.5);
    CHECK(outcome.metrics.at("accuracy").at(0) > 0.7);
    return;
  }
  const Outcome outcome = train({"--epochs", "2"});
  CHECK(outcome.metrics.at("accuracy").at(0) >= 0.70);
  CHECK(outcome.metrics.at("accuracy").at(1) >= 0.80);
}

TEST_CASE("Stage 01 takes the first of several GPUs, also of one that is named twice",
          "[cuda][stage]") {
  LOCKSTEP_NEEDS_GPU();
  const Outcome outcome =
      train({"--data", "synthetic:64:16", "--batch-size", "32"}, "cuda:0,cuda:0");
  CHECK(outcome.metrics.at("devices") == nlohmann::json{"cuda:0"});
  CHECK_THAT(outcome.metrics.at("backend").get<std::string>(), ContainsSubstring("cuda ("));
  CHECK(outcome.metrics.at("peak_memory_bytes").at(0) > 0);
}

// --- Kernels of a step ---------------------------------------------------------------------------

/// How often the second of two steps starts each operation for which no library is called. Each of
/// these is one kernel (launch.cuh).
std::map<std::string, int64_t> own_kernels_of_step(const Words& network) {
  const TempDir folder;
  train(Words{"--data", "synthetic:8:4", "--batch-size", "4", "--trace", folder / "trace"} +
        network);
  const Words others{"conv2d", "conv2d_backward_input", "conv2d_backward_parameters", "copy",
                     "matmul"};
  std::map<std::string, int64_t> counts;
  int64_t updates = 0;
  const nlohmann::json trace = read_json(folder / "trace");
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X" || updates == 2) continue;
    const std::string name = event.at("name");
    if (updates == 1 && std::ranges::find(others, name) == others.end()) ++counts[name];
    updates += name == "sgd_update";
  }
  REQUIRE(updates == 2);
  return counts;
}

/// All kernels of our own that a step starts: also those that copy tensors around cuDNN's
/// convolutions. Only the model counts them.
long kernels_started_by_step(const ModelOptions& model) {
  const auto device = open_device(kGpu, {});
  const Dataset set = make_synthetic(SyntheticPart::train, 4);
  Training training(device->create_stream("compute"), set, {.model = model, .batch_size = 4});
  training.epoch();  // which asks cuDNN for algorithms
  const long before = calls_of("kernel");
  training.epoch();
  return calls_of("kernel") - before;
}

TEST_CASE("A step starts no more kernels of our own than docs/options.md says", "[cuda][stage]") {
  LOCKSTEP_NEEDS_GPU();
  struct Counted {
    ModelOptions model;
    int64_t started;                                // kernels in all, on the model
    int64_t kernels, norms, linears, convolutions;  // without those that add biases
  };
  const std::vector<Counted> all{{{.kind = ModelKind::seed}, 23, 21, 0, 2, 2},
                                 {{.kind = ModelKind::seed_bn}, 31, 29, 2, 2, 2},
                                 {{.kind = ModelKind::resnet18, .width = 8}, 164, 119, 17, 1, 20}};
  for (const Counted& expected : all) {
    Words network{"--model", name_of(expected.model.kind)};
    if (expected.model.kind == ModelKind::resnet18) network = network + Words{"--width", "8"};
    auto counts = own_kernels_of_step(network);
    INFO(network[1] << ": " << nlohmann::json(counts).dump());
    if (is_model(*open_device(kGpu, {}))) {
      CHECK(kernels_started_by_step(expected.model) == expected.started);
    }
    // Where cuDNN's algorithm adds the bias of a convolution, no kernel of our own does.
    const int64_t biases = std::exchange(counts["add_bias"], 0);
    CHECK(biases >= expected.linears);
    CHECK(biases <= expected.linears + expected.convolutions);
    int64_t kernels = 0, norms = 0;
    for (const auto& [name, count] : counts) {
      kernels += count;
      if (name.starts_with("batch_norm")) norms += count;
    }
    CHECK(kernels == expected.kernels);
    CHECK(norms == 4 * expected.norms);
    CHECK(counts["add_column_sums"] == expected.linears + expected.convolutions);
  }
}

// --- Stage 02: several replicas ------------------------------------------------------------------

/// Ten steps of 13 samples, the last of 7; on the model four.
size_t step_count() {
  static const size_t count = thorough() ? 10 : 4;
  return count;
}

Words steps() {
  const std::string data = fmt::format("synthetic:{}:16", 13 * step_count() - 6);
  return {"--data", data, "--batch-size", "13", "--lr", "0.01", "--dropout"};
}

/// What stage 01 leaves on one GPU: one run for all cases.
Outcome alone(const Words& options) {
  static std::map<Words, Outcome> all;
  if (!all.contains(options)) all.emplace(options, train(options));
  REQUIRE(all.at(options).losses().size() == step_count());
  return all.at(options);
}

/// Stage 02 on these devices leaves the same as stage 01 on one GPU.
void check_data_parallel(const std::string& devices) {
  const Outcome single = alone(steps());
  INFO(devices);
  const Outcome several = train(steps(), devices, "02-dataparallel");
  CHECK(relative_l2(several.state, single.state) <= 1e-4);
  CHECK(relative_l2(several.losses(), single.losses()) <= 1e-4);
  CHECK(several.metrics.at("devices").size() == 2);
  const nlohmann::json& bytes = several.metrics.at("bytes_moved");
  CHECK(bytes.at("per_step") == bytes.at("predicted_per_step"));
  for (const auto& [phase, seconds] : several.metrics.at("phase_seconds").items()) {
    INFO(phase);
    CHECK(seconds > 0);
  }
  CHECK(several.metrics.at("phase_seconds").size() == 7);
  // The same run again gives the same bytes.
  CHECK((train(steps(), devices, "02-dataparallel").weights == several.weights));
}

TEST_CASE("Two replicas on one GPU lead to stage 01's weights",
          "[cuda][dataparallel][stage][row40]") {
  LOCKSTEP_NEEDS_GPU();
  check_data_parallel("cuda:0,cuda:0");
}

TEST_CASE("Two GPUs lead to stage 01's weights", "[cuda][dataparallel][stage]") {
  LOCKSTEP_NEEDS_GPU();
  if (cuda::availability().devices < 2) LOCKSTEP_SKIP("fewer than two GPUs");
  check_data_parallel("cuda:0,cuda:1");
}

TEST_CASE("Local BatchNorm on two replicas starts as the parts of a batch one after another",
          "[cuda][dataparallel][stage][row36]") {
  LOCKSTEP_NEEDS_GPU();
  const Words options{"--data", "synthetic:26:16", "--batch-size", "13", "--lr",
                      "0.01",   "--model",         "seed-bn"};
  const Outcome parts =
      train(options + Words{"--emulate", "chunk:2"}, "cuda:0", "01-single-gpu/reference");
  const Outcome two = train(options, "cuda:0,cuda:0", "02-dataparallel");
  REQUIRE(parts.losses().size() == 2);
  CHECK(relative_l2(two.losses(), parts.losses()) <= 1e-4);
}

// --- Stage 03: the network in pieces -------------------------------------------------------------

const Words kSchedules{"naive", "gpipe", "1f1b", "interleaved"};

/// Each step in 4 micro-batches: on these devices as on one GPU.
void check_pipelines(const std::string& devices, const Words& schedules) {
  const Outcome single = alone(steps());
  for (const std::string& schedule : schedules) {
    INFO(devices << ", --schedule " << schedule);
    const Words options = steps() + Words{"--schedule", schedule};
    const Outcome split = train(options, devices, "03-model-split");
    CHECK(relative_l2(split.state, single.state) <= 1e-4);
    CHECK(relative_l2(split.losses(), single.losses()) <= 1e-4);
    CHECK(split.metrics.at("stages").size() == split.metrics.at("devices").size());
    // The same run again, and with everything computed twice, gives the same bytes.
    CHECK((train(options + Words{"--recompute"}, devices, "03-model-split").weights ==
           split.weights));
  }
}

/// The same, split inside the layers.
void check_tensor_split(const std::string& devices, const Words& backend) {
  const Outcome single = alone(steps());
  const Outcome split = train(steps() + backend, devices, "03-model-split/tensor-split");
  CHECK(relative_l2(split.state, single.state) <= 1e-4);
  CHECK(relative_l2(split.losses(), single.losses()) <= 1e-4);
  CHECK(split.metrics.at("tensor_split").at("per_step").at("all_reduces") == 2);
}

TEST_CASE("Layers split on one GPU lead to stage 01's weights, through host memory",
          "[cuda][tensorsplit][stage]") {
  LOCKSTEP_NEEDS_GPU();
  check_tensor_split("cuda:0,cuda:0", {"--backend", "auto"});
}

TEST_CASE("Layers split over two GPUs lead to stage 01's weights, through host memory",
          "[cuda][tensorsplit][stage]") {
  LOCKSTEP_NEEDS_GPU();
  if (cuda::availability().devices < 2) LOCKSTEP_SKIP("fewer than two GPUs");
  check_tensor_split("cuda:0,cuda:1", {"--backend", "shm"});
}

TEST_CASE("Layers split over two GPUs with NCCL lead to stage 01's weights",
          "[cuda][tensorsplit][stage]") {
  LOCKSTEP_NEEDS_NCCL(2);
  if (is_model(*open_device(kGpu, {}))) {
    LOCKSTEP_SKIP("fewer than two GPUs: the CUDA model's NCCL joins threads, no processes");
  }
  check_tensor_split("cuda:0,cuda:1", {"--backend", "nccl"});
}

TEST_CASE("Stages that share one GPU lead to stage 01's weights", "[cuda][pipeline][stage]") {
  LOCKSTEP_NEEDS_GPU();
  check_pipelines("cuda:0,cuda:0,cuda:0", thorough() ? kSchedules : Words{"naive", "1f1b"});
}

TEST_CASE("Stages on two GPUs lead to stage 01's weights", "[cuda][pipeline][stage]") {
  LOCKSTEP_NEEDS_GPU();
  if (cuda::availability().devices < 2) LOCKSTEP_SKIP("fewer than two GPUs");
  // Stages copy from GPU to GPU: NCCL, which would fail here, is not opened.
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "ncclGetUniqueId:2");
  check_pipelines("cuda:0,cuda:1", thorough() ? kSchedules : Words{"gpipe", "interleaved"});
}

// --- Two GPUs that do not reach each other's memory ----------------------------------------------

TEST_CASE("Replicas on GPUs without access to each other's memory lead to stage 01's weights",
          "[cuda][dataparallel][stage]") {
  LOCKSTEP_NEEDS_GPU();
  if (cuda::availability().devices < 2) LOCKSTEP_SKIP("fewer than two GPUs");
  const ScopedEnvironment none("CUDA_MODEL_PEER_ACCESS", "0");  // of the model
  check_data_parallel("cuda:0,cuda:1");
}

TEST_CASE("Stages on GPUs without access to each other's memory lead to stage 01's weights",
          "[cuda][pipeline][stage]") {
  LOCKSTEP_NEEDS_GPU();
  if (cuda::availability().devices < 2) LOCKSTEP_SKIP("fewer than two GPUs");
  const ScopedEnvironment none("CUDA_MODEL_PEER_ACCESS", "0");
  check_pipelines("cuda:0,cuda:1", {"1f1b"});
}

// --- The command line: refused before any device is opened ---------------------------------------

void check_refused(const Words& options, const Words& fragments) {
  const ProcessResult run = run_process(
      Words{stage_binary("01-single-gpu/reference"), "--data", "synthetic:64:16"} + options,
      kDeadline);
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK(run.err.starts_with("error: "));
  CHECK(run.err.find('\n') == run.err.size() - 1);
  for (const std::string& fragment : fragments) CHECK_THAT(run.err, ContainsSubstring(fragment));
  CHECK_THAT(run.out, !ContainsSubstring("Train Epoch"));
}

TEST_CASE("A graph of a divided batch, and TF32 and NCHW on a CPU, are refused in one line",
          "[cuda][stage]") {
  check_refused({"--devices", "cpu:0", "--graph", "--emulate", "chunk:2"},
                {"--graph", "--emulate", "chunk:2"});
  check_refused({"--devices", "cpu:0", "--tf32"}, {"--tf32", "cpu:0", "--devices cuda:0"});
  check_refused({"--devices", "cpu:0", "--nchw"}, {"--nchw", "cpu:0", "--devices cuda:0"});
}

// --- Stage 04: a process per rank ----------------------------------------------------------------

const Words kOrder{"--order", "sampler"};

/// On these ranks as in one process.
void check_ranks(const std::string& devices, const std::vector<Words>& ways,
                 const std::string& stage = "04-ddp") {
  const Outcome single = alone(steps() + kOrder);
  for (const Words& way : ways) {
    INFO(devices << " " << way.back());
    const Outcome ranks = train(
        steps() + kOrder + Words{"--model", "seed", "--optimizer", "sgd"} + way, devices, stage);
    CHECK(relative_l2(ranks.state, single.state) <= 1e-4);
    CHECK(relative_l2(ranks.losses(), single.losses()) <= 1e-4);
    CHECK(ranks.metrics.at("accuracy") == single.metrics.at("accuracy"));
  }
}

TEST_CASE("Ranks that share one GPU lead to stage 01's weights", "[cuda][stage][ddp]") {
  LOCKSTEP_NEEDS_GPU();
  std::vector<Words> ways{{"--ddp", "bucketed"}, {"--all-reduce", "ring", "--bucket-mb", "0"}};
  if (thorough()) ways.insert(ways.end(), {{"--backend", "tcp"}, {"--ddp", "manual"}});
  check_ranks("cuda:0,cuda:0", ways);
}

TEST_CASE("One rank with NCCL leads to stage 01's weights", "[cuda][stage][ddp]") {
  LOCKSTEP_NEEDS_GPU();
  const std::string missing = nccl_availability();
  if (!missing.empty()) LOCKSTEP_SKIP("no GPU with NCCL: " + missing);
  check_ranks("cuda:0", {{"--backend", "nccl"}});
}

const std::vector<Words> kShardings{
    {"--shard", "parameters"}, {"--shard", "gradients"}, {"--shard", "optimizer"}};

TEST_CASE("Ranks that share one GPU and divide what they keep lead to stage 01's weights",
          "[cuda][stage][sharded]") {
  LOCKSTEP_NEEDS_GPU();
  check_ranks("cuda:0,cuda:0", thorough() ? kShardings : std::vector<Words>{kShardings[0]},
              "06-fully-sharded");
}

TEST_CASE("Sharding with NCCL leads to stage 01's weights", "[cuda][stage][sharded]") {
  LOCKSTEP_NEEDS_NCCL(1);
  check_ranks("cuda:0", {{"--backend", "nccl"}}, "06-fully-sharded");
  if (is_model(*open_device(kGpu, {})) || cuda::availability().devices < 2) return;  // see below
  check_ranks("cuda:0,cuda:1", kShardings, "06-fully-sharded");
}

TEST_CASE("Messages through NCCL are timed by events", "[cuda][stage][ddp]") {
  LOCKSTEP_NEEDS_NCCL(1);
  const TempDir folder;
  const auto program =
      std::filesystem::path(stage_binary("04-ddp")).parent_path() / "message-sizes";
  const ProcessResult run =
      run_process(Words{program, "--devices", "cuda:0", "--backend", "nccl", "--kib", "1",
                        "--rounds", "5", "--all-reduce", "library", "--metrics", folder / "rows"},
                  kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  CHECK_THAT(run.out, ContainsSubstring("by events on the GPU, many calls between two"));
  const nlohmann::json rows = read_json(folder / "rows");
  CHECK(rows.at(0).at("timed_by") == "events");
  CHECK(rows.at(0).at("seconds") > 0);
}

TEST_CASE("Two ranks with NCCL lead to stage 01's weights", "[cuda][stage][ddp]") {
  LOCKSTEP_NEEDS_NCCL(2);
  if (is_model(*open_device(kGpu, {}))) {
    LOCKSTEP_SKIP("fewer than two GPUs: the CUDA model's NCCL joins threads, no processes");
  }
  check_ranks("cuda:0,cuda:1", {{"--backend", "nccl"}, {"--all-reduce", "ring"}});
}

TEST_CASE("NCCL refuses one GPU for two ranks, and names both", "[cuda][stage][ddp]") {
  LOCKSTEP_NEEDS_GPU();
  const ProcessResult run = run_process(
      Words{stage_binary("04-ddp"), "--devices", "cuda:0,cuda:0", "--backend", "nccl"} + steps(),
      kDeadline);
  INFO(story(run));
  CHECK(run.status == 1);
  for (const char* part : {"rank 0", "rank 1", "leave --backend out"}) {
    CHECK_THAT(run.err, ContainsSubstring(part));
  }
}

TEST_CASE("A rank on a GPU that is killed ends the others", "[cuda][stage][ddp][row125]") {
  LOCKSTEP_NEEDS_GPU();
  const Words endless{"--data", "synthetic:64:16", "--epochs", "100000", "--log-interval", "1"};
  // The launcher's children are its keeper and two ranks; the last one is a rank.
  const Words kills{"sh", "-c",
                    "\"$@\" & children=/proc/$!/task/$!/children; "
                    "for look in $(seq 600); do "
                    "  [ $(wc -w < $children) -eq 3 ] && break; sleep 0.1; "
                    "done; sleep 1; "
                    "for rank in $(cat $children); do :; done; kill -9 $rank; wait $!",
                    "sh"};
  const ProcessResult run = run_process(
      kills + Words{stage_binary("04-ddp"), "--devices", "cuda:0,cuda:0"} + endless, kDeadline);
  INFO(story(run));
  CHECK(run.status == 128 + 9);
  CHECK_THAT(run.err, ContainsSubstring("was killed by signal 9"));
}

}  // namespace
}  // namespace lockstep
