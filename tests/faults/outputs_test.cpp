// Numbers that are none, and what a run writes.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <regex>
#include <set>

#include "common/core/error.h"
#include "common/data/synthetic.h"
#include "common/kernels/devices.h"
#include "common/nn/init.h"
#include "common/nn/optimizer.h"
#include "common/training/feeder.h"
#include "common/training/training_log.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/json.h"
#include "tests/support/refusals.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using Catch::Matchers::StartsWith;

// --- Numbers that are none -----------------------------------------------------------------------

/// Trained weights, with one number of `name` replaced.
void save_with(const std::filesystem::path& from, const std::filesystem::path& to,
               const std::string& name, Real value) {
  const SafetensorsFile file = load_safetensors(from);
  std::vector<TensorEntry> entries(file.tensors());
  std::vector<std::byte> changed;
  for (TensorEntry& entry : entries) {
    if (entry.name != name) continue;
    changed.assign(entry.bytes.begin(), entry.bytes.end());
    std::memcpy(changed.data() + changed.size() / 2 / sizeof value * sizeof value, &value,
                sizeof value);
    entry.bytes = changed;
  }
  REQUIRE_FALSE(changed.empty());
  save_safetensors(to, entries);
}

TEST_CASE("One NaN in the weights stops the run at its step", "[faults][row17]") {
  const TempDir folder;
  REQUIRE(run_stage01(kSmall + Words{"--save", folder / "good"}, kDeadline).status == 0);
  const std::string before = read_text(folder / "good");
  for (const Real value :
       {std::numeric_limits<Real>::quiet_NaN(), std::numeric_limits<Real>::infinity()}) {
    save_with(folder / "good", folder / "bad", "fc1.weight", value);
    const ProcessResult run =
        run_stage01(kSmall + Words{"--load", folder / "bad", "--save", folder / "good", "--metrics",
                                   folder / "metrics", "--trace", folder / "trace"},
                    kDeadline);
    check_error_line(run, {"step 0", "rank 0", "cpu:0", "not finite", "nothing was saved"});
    CHECK((read_text(folder / "good") == before));  // (( )): unprintable
    CHECK(folder.names() == Words{"bad", "good"});
  }
}

TEST_CASE("Weights that the last update spoilt are noticed and not saved", "[faults][row18]") {
  const TempDir folder;
  const ProcessResult run = run_stage01(
      kSmall + Words{"--lr", "1e12", "--max-steps", "1", "--save", folder / "weights"}, kDeadline);
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring("after 1 steps") && ContainsSubstring("test loss") &&
                          ContainsSubstring("no final weights were saved"));
  CHECK(folder.names() == Words{});
}

TEST_CASE("A learning rate far too high is noticed", "[faults][row18]") {
  const TempDir folder;
  const Words options = kSmall + Words{"--lr", "1e6", "--save", folder / "weights"};
  for (const std::string momentum : {"0", "0.9"}) {
    const ProcessResult run = run_stage01(options + Words{"--momentum", momentum}, kDeadline);
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring("not finite"));
    CHECK_THAT(run.err, ContainsSubstring("lower --lr (1000000)"));
    CHECK(run.err.find('\n') == run.err.size() - 1);
    CHECK_THAT(run.out, !ContainsSubstring("Test set"));
    CHECK(folder.names() == Words{});
  }
}

/// A training loop in this process, so that a test can reach between loader and network.
struct Training {
  Training()
      : device(open_device({DeviceId::Kind::cpu, 0}, {})),
        stream(device->create_stream("compute")),
        data(make_synthetic(SyntheticPart::train, 64)),
        model(make_model(options.model_options(data))),
        parameters(*model.network, stream),
        optimizer(parameters, {}),
        feeder(stream, data),
        context(stream),
        log("test", options, stream, {device.get()}, 64) {
    initialize(parameters, Initializer::kaiming_uniform, 1);
    log.begin_epoch(0);
  }

  /// One step over 8 samples; `damage` may change the images first.
  template <class Damage>
  void step(int64_t index, Damage damage) {
    DataLoader loader(data, {.batch_size = 8});
    loader.begin_epoch(0, index);
    const HostBatch batch = *loader.next();
    optimizer.zero_gradients();
    const Tensor loss = parameters.loss();
    context.begin_step({.step = index, .learning_rate = Real(0.1), .loss_weight = Real(1) / 8});
    const DeviceBatch& part = feeder.feed(batch, context);
    const AnyTensor images = feeder.normalize(part, context);
    damage(images);
    model.loss->forward(model.network->forward(images, context), part.labels, loss, context);
    model.network->backward(model.loss->backward(part.labels, context), context);
    optimizer.step(context.state(), loss);
    log.step(batch, loss, {optimizer.health()});
  }

  Options options;
  std::unique_ptr<Device> device;
  Stream stream;
  Dataset data;
  Model model;
  FlatParameters parameters;
  Optimizer optimizer;
  Feeder feeder;
  Context context;
  TrainingLog log;
};

TEST_CASE("One NaN in one pixel stops the run at its step", "[faults][row17]") {
  Training training;
  const auto leave = [](const Tensor&) {};
  const auto plant = [](const Tensor& images) {
    std::vector<Real> pixels = images.to_host();
    pixels[5 * 28 * 28 + 400] = std::numeric_limits<Real>::quiet_NaN();
    images.copy_from_host(pixels);
  };
  training.step(0, leave);
  training.step(1, leave);
  const std::vector<Real> last_good = training.parameters.values().to_host();
  training.step(2, plant);
  // The host learns of it one step later; that step, too, must leave the weights alone.
  std::string message = "nothing was thrown";
  try {
    training.step(3, leave);
  } catch (const NonFinite& error) {
    message = error.what();
  }
  CHECK_THAT(message, ContainsSubstring("step 2, rank 0 (cpu:0)"));
  CHECK_THAT(message, ContainsSubstring("as they were before that step"));
  CHECK(training.parameters.values().to_host() == last_good);
}

// --- Outputs -------------------------------------------------------------------------------------

TEST_CASE("The log has PyTorch's lines", "[faults]") {
  const ProcessResult run = run_stage01({"--data", "synthetic:800:16", "--batch-size", "8",
                                         "--log-interval", "10", "--max-steps", "25"},
                                        kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  CHECK(run.err.empty());
  const std::regex training(
      R"(\nTrain Epoch: 1 \[0/800 \(0%\)\]\tLoss: \d\.\d{6}\n)"
      R"(Train Epoch: 1 \[80/800 \(10%\)\]\tLoss: \d\.\d{6}\n)"
      R"(Train Epoch: 1 \[160/800 \(20%\)\]\tLoss: \d\.\d{6}\n)"
      R"(\nTest set: Average loss: \d\.\d{4}, Accuracy: (\d+)/16 \((\d+\.\d\d)%\)\n)");
  std::smatch found;
  REQUIRE(std::regex_search(run.out, found, training));
  CHECK(found[2] == fmt::format("{:.2f}", 100 * std::stod(found[1]) / 16));
  for (const std::string row : {"\nSummary\n", "  test accuracy ", "  samples/s ", "  epoch time ",
                                "  peak memory cpu:0 ", "  first step after ", "  process "}) {
    CHECK_THAT(run.out, ContainsSubstring(row));
  }
  CHECK(run.out.find('\r') == run.out.npos);  // a progress bar is for terminals
}

TEST_CASE("--metrics holds one object with everything", "[faults]") {
  const TempDir folder;
  const ProcessResult run =
      run_process(Words{stage_binary("01-single-gpu/reference"), "--devices", "cpu:0"} + kSmall +
                      Words{"--epochs", "2", "--lr", "0.05", "--log-interval", "1", "--metrics",
                            folder / "metrics", "--seed", "5", "--emulate", "micro:2"},
                  kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  const nlohmann::json metrics = read_json(folder / "metrics");
  CHECK(metrics.at("config").at("lr") == 0.05);
  CHECK(metrics.at("config").at("seed") == 5);
  CHECK(metrics.at("config").at("emulate") == "micro:2");
  CHECK(metrics.at("config").at("data") == "synthetic:64:16");
  CHECK(metrics.at("steps") == 16);
  CHECK(metrics.at("epoch_seconds").size() == 2);
  const std::vector<double> steps = metrics.at("step_seconds");
  CHECK(steps.size() == 16);
  const double all = std::accumulate(steps.begin(), steps.end(), 0.0);
  const std::vector<double> epochs = metrics.at("epoch_seconds");
  CHECK(all <= std::accumulate(epochs.begin(), epochs.end(), 0.0));
  CHECK(*std::min_element(steps.begin(), steps.end()) > 0);
  CHECK(metrics.at("accuracy").size() == 2);
  CHECK(metrics.at("samples_per_second").get<double>() > 0);
  CHECK(metrics.at("startup_seconds").get<double>() > 0);
  const int64_t device_peak = metrics.at("peak_memory_bytes").at(0);
  CHECK(device_peak > 2 * 21840 * int64_t{sizeof(Real)});  // weights and gradients at the least
  CHECK(metrics.at("peak_rss_bytes").get<int64_t>() > device_peak);

  // The losses of the log, with all their digits.
  const auto losses = metrics.at("losses").get<std::vector<double>>();
  REQUIRE(losses.size() == 16);
  bool longer = false;
  for (const double loss : losses) {
    CHECK_THAT(run.out, ContainsSubstring(fmt::format("\tLoss: {:.6f}\n", loss)));
    CHECK(double(Real(loss)) == loss);
    longer = longer || std::stod(fmt::format("{:.6f}", loss)) != loss;
  }
  CHECK(longer);
}

TEST_CASE("The process's memory is the program's, not that of who started it", "[faults]") {
  const TempDir folder;
  const std::string grow =
      "import os, sys; x = b'1' * (300 << 20); os.execv(sys.argv[1], sys.argv[1:])";
  const ProcessResult run = run_process(
      Words{"python3", "-c", grow, stage_binary("01-single-gpu"), "--metrics", folder / "metrics"} +
          kSmall,
      kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  const int64_t bytes = read_json(folder / "metrics").at("peak_rss_bytes");
  CHECK(bytes > 1 << 20);
#if !defined(__SANITIZE_ADDRESS__)
  CHECK(bytes < 150 << 20);
#endif
}

#if !defined(__SANITIZE_ADDRESS__)  // which wants more address space than there is

/// What a program does with so much address space.
ProcessResult run_within(int kibibytes, const Words& command) {
  const std::string limit = fmt::format("ulimit -v {}; exec \"$@\"", kibibytes);
  return run_process(Words{"sh", "-c", limit, "sh"} + command, kDeadline);
}

/// Whether that is enough for the system's loader to map the program and its libraries. Where it is
/// not, the loader says so with status 127, or dies: glibc 2.36 has a window of 8 KiB for that.
bool can_be_loaded(int kibibytes) {
  return run_within(kibibytes, {"env", "LD_TRACE_LOADED_OBJECTS=1", "LD_BIND_NOW=1",
                                stage_binary("01-single-gpu")})
             .status == 0;
}

/// Whether stage 01 trains within so much address space. If it does not, it must say so in one
/// line.
bool trains_within(int kibibytes) {
  const ProcessResult run =
      run_within(kibibytes, {stage_binary("01-single-gpu"), "--data", "synthetic:64:16"});
  INFO(kibibytes << " KiB: " << story(run));
  if (run.status == 127) return false;  // glibc's last own allocation
  if (run.status == 0) return true;
  CHECK((run.status == 1 || run.status == 2));
  // OpenMP's library ends the process itself.
  CHECK_THAT(run.err, StartsWith("error: ") || StartsWith("\nlibgomp: Out of memory"));
  CHECK_THAT(run.err, !ContainsSubstring("unexpected"));
  if (run.err.starts_with("error: ")) {
    CHECK_THAT(run.err, ContainsSubstring(fmt::format("ulimit -v is {} KiB", kibibytes)));
  }
  return false;
}

TEST_CASE("Little memory is one clear line, whatever asked for it", "[faults]") {
  int first = 25'000;
  while (!can_be_loaded(first)) first += 250;
  // In small steps where the program just starts: even its libraries' and its own first allocations
  // fail there.
  int refused = first, enough = first;
  while (!trains_within(enough)) {
    refused = enough;
    enough += enough < first + 20'000 ? 250 : 25'000;
    REQUIRE(enough < 4'000'000);
  }
  REQUIRE(enough > first);
  // And where it nearly trains: there the last allocations fail, those of the first step.
  while (enough - refused > 100) {
    const int middle = (enough + refused) / 2;
    (trains_within(middle) ? enough : refused) = middle;
  }
  for (int missing = 50; missing <= 1'000; missing += 50) trains_within(enough - missing);
}
#endif

TEST_CASE("--trace is a timeline of every stream, one operation after another", "[faults]") {
  const TempDir folder;
  REQUIRE(run_stage01(kSmall + Words{"--trace", folder / "trace"}, kDeadline).status == 0);
  const nlohmann::json trace = read_json(folder / "trace");
  CHECK(trace.at("otherData").at("zero_ns").get<int64_t>() > 0);
  const nlohmann::json& events = trace.at("traceEvents");
  std::map<std::pair<int, int>, double> end_of_lane;
  std::set<std::string> labels, operations, layers;
  int64_t most_bytes = 0;
  for (const nlohmann::json& event : events) {
    const std::string name = event.at("name");
    if (event.at("ph") == "M") {
      labels.insert(name + "=" + event.at("args").at("name").get<std::string>());
      continue;
    }
    if (event.at("ph") == "C") {  // bytes in use
      CHECK(name == "memory");
      most_bytes = std::max(most_bytes, event.at("args").at("bytes").get<int64_t>());
      continue;
    }
    REQUIRE(event.at("ph") == "X");
    operations.insert(name);
    layers.insert(event.at("args").at("layer").get<std::string>());
    const double begin = event.at("ts"), duration = event.at("dur");
    double& end = end_of_lane[{event.at("pid"), event.at("tid")}];
    if (begin < end - 1e-6 || duration < 0) FAIL(name << " at " << begin << " overlaps");
    end = begin + duration;
  }
  CHECK(labels == std::set<std::string>{"process_name=cpu:0", "thread_name=compute"});
  CHECK(end_of_lane.size() == 1);
  CHECK(most_bytes > 2 * 21'840 * int64_t(sizeof(float)));  // parameters and gradients
  const auto has_all = [](const std::set<std::string>& set, const std::set<std::string>& wanted) {
    return std::includes(set.begin(), set.end(), wanted.begin(), wanted.end());
  };
  CHECK(has_all(operations, {"conv2d", "conv2d_backward_parameters", "max_pool2d", "matmul",
                             "nll_loss", "sgd_update", "copy"}));
  CHECK(has_all(layers, {"conv1", "conv2", "pool1", "pool2", "fc1", "fc2", ""}));
}

TEST_CASE("A comparison measures the stages that were built", "[faults][compare]") {
  const TempDir folder;
  const std::string compare =  // with shorter runs for the timelines
      "import compare; compare.TRACED_SECONDS = 0.05; compare.run_command(compare.main)";
  const ProcessResult run = run_process(
      {"python3", "-c", compare, "--build", build_dir(), "--stages", "01,05", "--devices",
       "cpu:0,cpu:1", "--data", "synthetic:320:64", "--json", folder / "found"},
      kDeadline, {{"PYTHONPATH", LOCKSTEP_SOURCE "/tools"}});
  INFO(story(run));
  REQUIRE(run.status == 0);
  const nlohmann::json runs = read_json(folder / "found").at("runs");
  REQUIRE(runs.size() == 3);
  size_t refused = 0;  // timelines: beside other work no step may be typical
  const std::array<std::string, 3> networks{"seed", "seed-bn", "seed-bn"};
  const std::array<size_t, 3> streams{1, 1, 4};  // two ranks that compute and communicate
  for (size_t i = 0; i < runs.size(); ++i) {
    CHECK(runs[i].at("metrics").at("config").at("model") == networks[i]);
    CHECK(runs[i].at("metrics").at("speedup").get<double>() > 0);
    const nlohmann::json& step = runs[i].at("step");
    refused += step.is_null();
    if (step.is_null()) continue;
    CHECK(step.at("lanes").size() == streams[i]);
    for (const nlohmann::json& lane : step.at("lanes")) CHECK_FALSE(lane.at("slices").empty());
  }
  CHECK(size_t(std::ranges::count(run.err, '\n')) == refused);  // each is said in a line
  CHECK_THAT(run.err,
             Catch::Matchers::Matches("(.*: no timeline: the steps of 5 traced runs take .*\n)*"));
  CHECK(runs[2].at("proof").at("proof_value").get<double>() <= 1e-5);
}

TEST_CASE("Outputs have any legal name, and go to where a link leads", "[faults]") {
  const TempDir folder;
  const std::string longest(255, 'w');
  write_file(folder / "kept", std::string("old"));
  std::filesystem::permissions(folder / "kept", std::filesystem::perms(0640));
  std::filesystem::create_symlink("kept", folder / "link");
  const ProcessResult run = run_stage01(
      kSmall + Words{"--save", folder / longest, "--metrics", folder / "link"}, kDeadline);
  INFO(story(run));
  CHECK(run.status == 0);
  CHECK(folder.names() == Words{"kept", "link", longest});
  CHECK(std::filesystem::is_symlink(folder / "link"));
  CHECK(int(std::filesystem::status(folder / "kept").permissions()) == 0640);
  CHECK(read_json(folder / "kept").contains("steps"));
  CHECK(run_stage01(kSmall + Words{"--save", folder / "link"}, kDeadline).status == 0);
  CHECK(std::filesystem::is_symlink(folder / "link"));
  CHECK(int(std::filesystem::status(folder / "kept").permissions()) == 0640);
  CHECK((read_text(folder / "kept") == read_text(folder / longest)));
  // Looked at before training; a further rank's trace has a longer name.
  for (const auto& [option, length] : {std::pair("--save", 256), std::pair("--trace", 246)}) {
    check_error_line(
        run_stage01(kSmall + Words{option, folder / std::string(size_t(length), 'x')}, kDeadline),
        {option, "the name has 256 bytes", "expected at most 255; give a shorter one"});
  }
}

TEST_CASE("A full disk is one clear line, and no half a file", "[faults]") {
  const TempDir folder;
  write_file(folder / "weights", std::string("what was there"));
  // A limit on the size of files simulates a full disk; its signal is ignored, so that write()
  // fails.
  const Words limited{"sh", "-c", "trap '' XFSZ; ulimit -f 8; exec \"$@\"", "sh"};
  const Words program = Words{stage_binary("01-single-gpu"), "--devices", "cpu:0"} + kSmall;
  const ProcessResult run =
      run_process(limited + program + Words{"--save", folder / "weights"}, kDeadline);
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring("cannot save " + (folder / "weights").string()));
  CHECK_THAT(run.err, ContainsSubstring("File too large"));
  CHECK(run.err.find('\n') == run.err.size() - 1);
  CHECK(folder.names() == Words{"weights"});
  CHECK(read_text(folder / "weights") == "what was there");
}

TEST_CASE("A reader that leaves ends the run, and nobody is late", "[faults]") {
  // The shell of the pipeline reports how the program ended, on stderr.
  const Words pipeline{"sh", "-c", "{ \"$@\"; echo \"status $?\" >&2; } | head -1", "sh"};
  const Words many_lines{"--data", "synthetic:64:2", "--batch-size", "2", "--log-interval",
                         "1",      "--epochs",       "1000"};
  for (const int ranks : {1, 2}) {
    const Words program{stage_binary(ranks == 1 ? "01-single-gpu" : "04-ddp"), "--devices",
                        cpus(ranks)};
    const ProcessResult run = run_process(pipeline + program + many_lines, kDeadline);
    INFO(story(run));
    CHECK_FALSE(run.timed_out);
    CHECK(run.status == 0);
    CHECK_THAT(run.err, EndsWith("status 141\n"));  // 128 + SIGPIPE
    CHECK_THAT(run.err, !ContainsSubstring("flight recorder"));
    CHECK((ranks == 2 || run.err == "status 141\n"));
    CHECK(std::count(run.out.begin(), run.out.end(), '\n') == 1);
  }
}

}  // namespace
}  // namespace lockstep
