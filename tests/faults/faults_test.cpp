// What stage 01 does when something is wrong: one clear line, a status, and nothing left behind.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <regex>
#include <set>

#include "common/app/training_log.h"
#include "common/core/error.h"
#include "common/data/synthetic.h"
#include "common/kernels/devices.h"
#include "common/nn/init.h"
#include "common/nn/sgd.h"
#include "common/step/feeder.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/json.h"
#include "tests/support/refusals.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

// --- Data sets -----------------------------------------------------------------------------------

constexpr uint32_t kTrain = 70, kTest = 30;

/// Four good files; each test damages one.
struct DataFiles {
  DataFiles() {
    for (const auto& [part, count] : {std::pair("train", kTrain), std::pair("t10k", kTest)}) {
      const size_t pixels = size_t{count} * 28 * 28;
      files[std::string(part) + "-images-idx3-ubyte"] =
          idx_bytes(2051, {count, 28, 28}, counting(pixels, 251));
      files[std::string(part) + "-labels-idx1-ubyte"] = idx_labels(count);
    }
  }
  Bytes& operator[](const std::string& name) { return files.at(name); }
  void rename(const std::string& from, const std::string& to) {
    auto node = files.extract(from);
    node.key() = to;
    files.insert(std::move(node));
  }
  void write(const std::filesystem::path& folder) const {
    for (const auto& [name, bytes] : files) write_file(folder / name, bytes);
  }
  std::map<std::string, Bytes> files;
};

const std::string kImages = "train-images-idx3-ubyte";
const std::string kLabels = "train-labels-idx1-ubyte";

void check_data_refused(const DataFiles& data, const Words& fragments, const Words& more = {}) {
  const TempDir folder;
  data.write(folder.path());
  check_stage_refuses(Words{"--data-dir", folder.path()} + more, fragments);
}

TEST_CASE("Good files train", "[faults]") {
  const TempDir folder;
  DataFiles().write(folder.path());
  const ProcessResult run = run_stage01({"--data-dir", folder.path()}, kDeadline);
  INFO(story(run));
  CHECK(run.status == 0);
  CHECK_THAT(run.out, ContainsSubstring("70 training and 30 test images of 28x28x1"));
}

TEST_CASE("A wrong magic number is refused", "[faults][row2]") {
  DataFiles images, labels;
  images[kImages][3] = 1;
  check_data_refused(images, {kImages, "2049", "2051"});
  labels["t10k-labels-idx1-ubyte"][3] = 3;
  check_data_refused(labels, {"t10k-labels-idx1-ubyte", "2051", "2049"});
}

TEST_CASE("A truncated file is refused with both sizes", "[faults][row3]") {
  DataFiles data;
  data[kImages].resize(data[kImages].size() - 1);
  check_data_refused(data, {kImages, "54895", "54896", "truncated"});
}

TEST_CASE("Trailing bytes are refused", "[faults][row4]") {
  DataFiles data;
  data[kImages].push_back(0);
  check_data_refused(data, {kImages, "54897", "54896", "too long"});
}

TEST_CASE("Another number of labels than images is refused with both", "[faults][row5]") {
  DataFiles data;
  data[kLabels] = idx_labels(71);
  check_data_refused(data, {kImages, kLabels, "70 images", "71 labels"});
}

TEST_CASE("A label beyond the classes is refused with index and value", "[faults][row6]") {
  for (const int label : {10, 255}) {
    DataFiles data;
    data[kLabels][8 + 42] = static_cast<uint8_t>(label);
    check_data_refused(data, {kLabels, fmt::format("label {}", label), "index 42", "0 to 9"});
  }
}

TEST_CASE("A header that promises 2^31 images is refused before memory is asked for",
          "[faults][row7]") {
  DataFiles data;
  data[kImages] = idx_bytes(2051, {0x80000000u, 28, 28}, counting(100, 251));
  check_data_refused(data, {kImages, "2147483648 x 28 x 28", "truncated"});
  data.rename(kImages, kImages + ".gz");
  data[kImages + ".gz"] = gzip(data[kImages + ".gz"]);
  check_data_refused(data, {kImages + ".gz", "2147483648 x 28 x 28"});
}

TEST_CASE("A damaged gzip file is refused", "[faults][row8]") {
  DataFiles whole, cut, wrong;
  for (DataFiles* data : {&whole, &cut, &wrong}) {
    (*data)[kImages] = gzip((*data)[kImages]);
    data->rename(kImages, kImages + ".gz");
  }
  Bytes& truncated = cut[kImages + ".gz"];
  truncated.resize(truncated.size() - 20);
  check_data_refused(cut, {kImages + ".gz", "truncated"});
  Bytes& checksum = wrong[kImages + ".gz"];
  checksum[checksum.size() - 8] ^= 1;
  check_data_refused(wrong, {kImages + ".gz"});

  const TempDir folder;
  whole.write(folder.path());
  CHECK(run_stage01({"--data-dir", folder.path()}, kDeadline).status == 0);
}

TEST_CASE("Missing data is one line that says how to get it", "[faults][row9]") {
  const TempDir folder;
  const Words advice{"./lockstep data fashion-mnist", "--data synthetic"};
  check_stage_refuses({"--data-dir", folder / "nowhere"},
                      advice + Words{(folder / "nowhere").string()});
  check_stage_refuses({"--data-dir", folder.path()},
                      advice + Words{folder.path().string(), kImages});
  DataFiles data;
  data.files.erase(kLabels);
  check_data_refused(data, advice + Words{kLabels, "missing"});
  check_stage_refuses({"--data", "cifar10", "--data-dir", folder.path()},
                      {"./lockstep data cifar10"});

  DataFiles().write(folder.path());
  std::filesystem::permissions(folder / kImages, std::filesystem::perms::none);
  check_stage_refuses({"--data-dir", folder.path()}, {kImages, "ermission"}, without_privileges());
}

TEST_CASE("An epoch without batches is refused", "[faults][row10]") {
  DataFiles data;
  data[kImages] = idx_bytes(2051, {0, 28, 28}, {});
  data[kLabels] = idx_labels(0);
  check_data_refused(data, {"0 batches"});
  check_data_refused(DataFiles(), {"0 batches", "71"}, {"--drop-last", "--batch-size", "71"});
}

TEST_CASE("Arguments of the loader are refused with their value", "[faults][row25]") {
  check_stage_refuses(kSmall + Words{"--batch-size", "0"}, {"--batch-size", "'0'", "1 to 1000000"});
  check_stage_refuses(kSmall + Words{"--workers", "-1"}, {"--workers", "'-1'", "0 to 256"});
  check_stage_refuses(kSmall + Words{"--loader-timeout", "-0.5"}, {"--loader-timeout", "'-0.5'"});
  check_stage_refuses(kSmall + Words{"--workers", "0", "--loader-timeout", "3"},
                      {"--loader-timeout", "3", "--workers 1"});
  check_stage_refuses(kSmall + Words{"--prefetch-factor", "0"},
                      {"--prefetch-factor", "'0'", "1 to"});
  check_stage_refuses(kSmall + Words{"--workers", "0", "--prefetch-factor", "3"},
                      {"--prefetch-factor", "3", "--workers 1"});
}

TEST_CASE("A GPU that is not there is refused, and by default a run says that it has none",
          "[faults][row128]") {
  const std::vector<std::pair<std::string, std::string>> no_gpu{{"CUDA_VISIBLE_DEVICES", ""}};
  const Words program = Words{stage_binary("01-single-gpu")} + kSmall;
  check_error_line(run_process(program + Words{"--devices", "cuda:0"}, kDeadline, no_gpu),
                   {"cuda:0", "--devices cpu:0"});

  const ProcessResult run = run_process(program, kDeadline, no_gpu);
  INFO(story(run));
  CHECK(run.status == 0);
  CHECK(run.err.empty());
  CHECK_THAT(run.out, ContainsSubstring("seed on cpu:0"));
  CHECK_THAT(run.out, ContainsSubstring("(no GPU: "));
}

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
  const std::string before = read_file(folder / "good");
  for (const Real value :
       {std::numeric_limits<Real>::quiet_NaN(), std::numeric_limits<Real>::infinity()}) {
    save_with(folder / "good", folder / "bad", "fc1.weight", value);
    const ProcessResult run =
        run_stage01(kSmall + Words{"--load", folder / "bad", "--save", folder / "good", "--metrics",
                                   folder / "metrics", "--trace", folder / "trace"},
                    kDeadline);
    check_error_line(run, {"step 0", "rank 0", "cpu:0", "not finite", "nothing was saved"});
    CHECK((read_file(folder / "good") == before));  // (( )): unprintable
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
    const Tensor images = feeder.normalize(part, context);
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
  Sgd optimizer;
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
  // The host learns of it a step late; that step, too, must leave the weights alone.
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
TEST_CASE("Little memory is one clear line, whatever asked for it", "[faults]") {
  int refused = 0;
  for (int mebibytes = 48; mebibytes <= 288; mebibytes += 24) {
    const std::string limit = fmt::format("ulimit -v {}; exec \"$@\"", 1024 * mebibytes);
    const ProcessResult run = run_process(
        Words{"sh", "-c", limit, "sh", stage_binary("01-single-gpu"), "--data", "synthetic:64:16"},
        kDeadline);
    INFO(mebibytes << " MiB: " << story(run));
    if (run.status == 0 || run.status == 127) continue;  // enough; or not even for the program
    ++refused;
    CHECK((run.status == 1 || run.status == 2));
    CHECK(run.err.starts_with("error: "));
    CHECK_THAT(run.err, !ContainsSubstring("unexpected"));
  }
  CHECK(refused > 0);
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
  for (const nlohmann::json& event : events) {
    const std::string name = event.at("name");
    if (event.at("ph") == "M") {
      labels.insert(name + "=" + event.at("args").at("name").get<std::string>());
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
  const auto has_all = [](const std::set<std::string>& set, const std::set<std::string>& wanted) {
    return std::includes(set.begin(), set.end(), wanted.begin(), wanted.end());
  };
  CHECK(has_all(operations, {"conv2d", "conv2d_backward_parameters", "max_pool2d", "matmul",
                             "nll_loss", "sgd_update", "copy"}));
  CHECK(has_all(layers, {"conv1", "conv2", "pool1", "pool2", "fc1", "fc2", ""}));
}

TEST_CASE("A comparison measures the stages that were built", "[faults][compare]") {
  const TempDir folder;
  const ProcessResult run = run_process(
      {"python3", LOCKSTEP_SOURCE "/tools/compare.py", "--build", build_dir(), "--stages", "01,05",
       "--devices", "cpu:0,cpu:1", "--data", "synthetic:320:64", "--json", folder / "found"},
      kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  CHECK(run.err.empty());
  const nlohmann::json runs = read_json(folder / "found").at("runs");
  REQUIRE(runs.size() == 3);
  const std::array<std::string, 3> networks{"seed", "seed-bn", "seed-bn"};
  const std::array<size_t, 3> streams{1, 1, 4};  // two ranks that compute and communicate
  for (size_t i = 0; i < runs.size(); ++i) {
    CHECK(runs[i].at("metrics").at("config").at("model") == networks[i]);
    CHECK(runs[i].at("metrics").at("speedup").get<double>() > 0);
    const nlohmann::json& lanes = runs[i].at("step").at("lanes");
    CHECK(lanes.size() == streams[i]);
    for (const nlohmann::json& lane : lanes) CHECK_FALSE(lane.at("slices").empty());
  }
  CHECK(runs[2].at("proof").at("proof_value").get<double>() <= 1e-5);
}

TEST_CASE("A full disk is one clear line, and no half a file", "[faults]") {
  const TempDir folder;
  write_file(folder / "weights", std::string("what was there"));
  // A limit on the size of files stands for the disk; its signal is ignored, so that write() fails.
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
  CHECK(read_file(folder / "weights") == "what was there");
}

TEST_CASE("A reader that leaves ends the run", "[faults]") {
  // The shell of the pipeline reports how the program ended, on stderr.
  const Words pipeline{"sh", "-c", "{ \"$@\"; echo \"status $?\" >&2; } | head -1", "sh"};
  const Words program{stage_binary("01-single-gpu"), "--devices", "cpu:0"};
  const Words many_lines{"--data", "synthetic:64:1", "--batch-size", "1", "--log-interval", "1"};
  const ProcessResult run =
      run_process(pipeline + program + many_lines + Words{"--epochs", "1000"}, kDeadline);
  INFO(story(run));
  CHECK_FALSE(run.timed_out);
  CHECK(run.status == 0);
  CHECK(run.err == "status 141\n");  // 128 + SIGPIPE
  CHECK(std::count(run.out.begin(), run.out.end(), '\n') == 1);
}

// --- Stage 02 ------------------------------------------------------------------------------------

void check_refused_by_stage02(const Words& options, const Words& fragments) {
  check_stage_refuses(options, fragments, {}, "02-dataparallel");
}

TEST_CASE("Stage 02 refuses what it cannot do, and devices that are none",
          "[faults][dataparallel][row40]") {
  check_refused_by_stage02(kSmall + Words{"--reduce", "nonsense"},
                           {"--reduce", "'nonsense'", "manual or library"});
  check_refused_by_stage02(kSmall + Words{"--reduce"}, {"--reduce"});
  check_refused_by_stage02(kSmall + Words{"--graph"}, {"--graph"});
  check_refused_by_stage02(kSmall + Words{"--emulate", "chunk:2"}, {"--emulate"});
  check_refused_by_stage02(kSmall + Words{"--devices", "cpu:0,cuda:0"}, {"cpu:0 and cuda:0"});
  check_refused_by_stage02(kSmall + Words{"--devices", "cpu:0,,cpu:1"}, {"--devices"});
  check_refused_by_stage02(kSmall + Words{"--devices", "cpu:0,tpu:1"}, {"tpu:1"});
  // --reduce is stage 02's own.
  check_stage_refuses(kSmall + Words{"--reduce", "manual"}, {"--reduce"});
}

TEST_CASE("Stage 02 refuses broken data and weights", "[faults][dataparallel][row3]") {
  DataFiles data;
  data[kImages].resize(data[kImages].size() - 1);
  const TempDir folder;
  data.write(folder.path());
  check_refused_by_stage02({"--data-dir", folder.path()}, {kImages, "54895", "54896", "truncated"});
  check_refused_by_stage02(kSmall + Words{"--load", "/nowhere/weights"},
                           {"/nowhere/weights", "No such file"});
}

// --- Stage 03 ------------------------------------------------------------------------------------

TEST_CASE("Stage 03 refuses splits and schedules that cannot be", "[faults][pipeline][row48]") {
  const auto check = [](const Words& options, const Words& fragments) {
    check_stage_refuses(kSmall + options, fragments, {}, "03-model-split");
  };
  check({"--schedule", "pipedream"}, {"--schedule", "'pipedream'", "naive, gpipe or 1f1b"});
  check({"--schedule", "naive", "--micro-batches", "4"}, {"naive", "4", "gpipe or 1f1b"});
  check({"--micro-batches", "-1"}, {"--micro-batches"});
  check({"--split", "sideways"}, {"--split", "'sideways'", "auto, measured, parameters"});
  check({"--split", "2,2", "--devices", "cpu:0,cpu:1,cpu:2"}, {"--split", "2,2", "1 to 7"});
  check({"--split", "2,4", "--devices", "cpu:0,cpu:1"}, {"3 stages", "--devices names 2"});
  check({"--devices", "cpu:0,cpu:1,cpu:2,cpu:3,cpu:4,cpu:5,cpu:6,cpu:7,cpu:8"},
        {"--split", "9 stages of 8 layers"});
  // 64 images in batches of 30 leave a last one of 4.
  check_stage_refuses({"--data", "synthetic:64:16", "--batch-size", "30", "--micro-batches", "5"},
                      {"--micro-batches", "5", "4 samples"}, {}, "03-model-split");
  check({"--emulate", "chunk:2"}, {"--emulate"});
  check({"--tensor-split", "conv2", "fc1"}, {"--tensor-split", "program tensor-split", "--layers"});
}

TEST_CASE("Stage 03 refuses to split layers that do not divide", "[faults][tensorsplit][row55]") {
  const auto check = [](const Words& options, const Words& fragments) {
    check_stage_refuses(kSmall + options, fragments, {}, "03-model-split/tensor-split");
  };
  check({"--layers", "conv2", "--devices", "cpu:0,cpu:1,cpu:2"}, {"conv2", "20", "3"});
  check({"--layers", "fc2"}, {"'fc2'", "conv2, fc1"});
  check({"--devices", "cpu:0,cpu:1,cpu:2"}, {"--layers auto", "3 devices"});
  check({"--emulate", "chunk:2"}, {"--emulate"});
  check({"--schedule", "1f1b"}, {"--schedule"});  // is the pipeline's
}

TEST_CASE("Stage 03 draws its timetable without devices or data", "[faults][pipeline]") {
  const ProcessResult run =
      run_process({stage_binary("03-model-split"), "--print-schedule", "--devices", "cpu:0,cpu:1",
                   "--micro-batches", "2", "--data-dir", "/nowhere"},
                  kDeadline);
  INFO(story(run));
  CHECK(run.status == 0);
  CHECK_THAT(run.out, ContainsSubstring("1f1b, 2 stages, 2 micro-batches\nstage 0  F0 F1"));
}

TEST_CASE("The lesson's timetables are those of the program", "[faults][pipeline]") {
  const std::string lesson = read_file(LOCKSTEP_SOURCE "/03-model-split/pipeline/README.md");
  for (const Words& options : {Words{"naive", "1", "cpu:0,cpu:1,cpu:2,cpu:3"},
                               {"gpipe", "6", "cpu:0,cpu:1,cpu:2"},
                               {"1f1b", "6", "cpu:0,cpu:1,cpu:2"}}) {
    const ProcessResult run =
        run_process({stage_binary("03-model-split"), "--print-schedule", "--schedule", options[0],
                     "--micro-batches", options[1], "--devices", options[2]},
                    kDeadline);
    INFO(story(run));
    REQUIRE(run.status == 0);
    const size_t begin = run.out.find('\n') + 1, end = run.out.find("bubble");
    REQUIRE(end > begin);
    CHECK_THAT(lesson, ContainsSubstring(run.out.substr(begin, end - begin)));
  }
}

TEST_CASE("Stage 03 has no timetable to compare with stage 01", "[faults][pipeline]") {
  check_stage_refuses({"--print-schedule", "--baseline"},
                      {"--print-schedule", "--baseline", "leave one"}, {}, "03-model-split");
}

TEST_CASE("The program of equal layers measures what it says, beside the formula",
          "[faults][pipeline]") {
  const TempDir folder;
  const auto bubble = [&](const Words& options) {
    return run_process(Words{stage_binary("03-model-split/bubble")} + options, kDeadline);
  };
  const ProcessResult run =
      bubble({"--stages", "1,2", "--micro-batches", "1,2", "--schedules", "naive,1f1b", "--sleep",
              "4", "--steps", "2", "--metrics", folder / "rows"});
  INFO(story(run));
  REQUIRE(run.status == 0);
  const nlohmann::json rows = nlohmann::json::parse(read_file(folder / "rows"));
  REQUIRE(rows.size() == 6);  // the naive schedule has one micro-batch
  for (const auto& row : rows) {
    const double p = row["stages"], m = row["micro_batches"];
    CHECK(double(row["bubble"]["predicted"]) == Approx((p - 1) / (m + p - 1)));
    CHECK((row["bubble"]["measured"] >= 0.0 && row["bubble"]["measured"] < 1.0));
    CHECK(row["peak_memory_bytes"].size() == size_t(p));
    // Eight layers of 4 ms and of 8 ms, of which stages overlap all but the bubble.
    CHECK(double(row["step_seconds"]) >= 0.99 * 8 * 0.012 * (m + p - 1) / (m * p));
  }
  const auto refused = [&](const Words& options, const std::string& fragment) {
    const ProcessResult bad = bubble(options);
    INFO(story(bad));
    CHECK(bad.status == 1);
    CHECK_THAT(bad.err, Catch::Matchers::StartsWith("error: ") && ContainsSubstring(fragment));
    CHECK(bad.err.find('\n') == bad.err.size() - 1);
  };
  refused({"--stages", "4"}, "--stages: 4 of the 2 devices in --devices cpu:0,cpu:1");
  refused({"--stages", "3"}, "--stages: 3 cannot have equally many of 8 layers");
  refused({"--schedules", "pipedream"}, "'pipedream'");
  refused({"--sleep", "-1"}, "--sleep");
  refused({"--metrics", "/nowhere/rows"}, "--metrics /nowhere/rows");
}

TEST_CASE("Stage 02 stops at the step whose loss is not finite", "[faults][dataparallel][row18]") {
  const TempDir folder;
  const Words program{stage_binary("02-dataparallel"), "--devices", "cpu:0,cpu:1"};
  const ProcessResult run =
      run_process(program + kSmall + Words{"--lr", "1e6", "--save", folder / "weights"}, kDeadline);
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK(run.err.find('\n') == run.err.size() - 1);
  CHECK_THAT(run.err, ContainsSubstring("not finite"));
  CHECK(folder.names() == Words{});
}

}  // namespace
}  // namespace lockstep
