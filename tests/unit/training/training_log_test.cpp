// What a run reports: the lines of its log, the figures of --metrics and --trace.

#include "common/training/training_log.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <thread>

#include "common/core/error.h"
#include "common/core/stream_backend.h"
#include "common/io/json.h"
#include "common/kernels/devices.h"
#include "common/kernels/kernels.h"
#include "tests/support/captured_output.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/json.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using testing::CapturedOutput;
using testing::message_of;
using testing::read_json;
using testing::TempDir;

/// All three ranks' answers: rank 1 has twice rank 0's figures, on a device of another name, and
/// the largest process; rank 2 has nothing.
std::vector<std::string> with_other_ranks(const std::string& mine) {
  json other = parse_json(mine), last = other;
  if (other.is_array()) {
    other = {"cpu:7"};
    last = json::array();
  }
  if (other.contains("flops")) {
    other["names"] = {"cpu:7"};
    other["flops"] = 2 * other["flops"].get<double>();
    other["rss"] = 1 + other["rss"].get<int64_t>();
    for (json& peak : other["peaks"]) peak = 2 * peak.get<int64_t>();
    last.update({{"names", json::array()}, {"peaks", json::array()}, {"flops", 0}, {"rss", 0}});
  }
  return {mine, other.dump(), last.dump()};
}

constexpr auto kStep = std::chrono::milliseconds(4);  // a step takes that at least

/// A run over 20 samples in batches of 4 that resumes after three steps: at batch 2 of the second
/// epoch, to its end, and with one step of the third.
struct Told {
  explicit Told(const TempDir& folder) {
    const auto begin = testing::Clock::now();
    const auto device = open_device({DeviceId::Kind::cpu, 0}, {.trace = true});
    const Stream stream = device->create_stream("compute"), late = device->create_stream("late");
    const Tensor other_loss = Tensor::empty(late, {1});
    late.synchronize();  // so that the trace has it before what the other stream allocates
    Options options;
    options.batch_size = 4;
    options.log_interval = 2;
    options.model = ModelKind::resnet18;
    options.metrics = folder / "metrics";
    options.trace = folder / "trace";
    const Tensor loss = Tensor::empty(stream, {1});
    const auto health = HealthTensor::from_host(stream, {}, {Health{}});
    Dataset train, test;
    train.name = "numbers";
    train.height = 2, train.width = 3, train.channels = 1;
    train.labels.resize(20);
    test.labels.resize(8);
    {
      const CapturedOutput output(folder / "output");
      TrainingLog log("a stage", options, stream, {device.get()}, 20, {0, with_other_ranks, {}});
      log.start(train, test, 1234);
      log.resume(3, 0);
      const auto step = [&](int64_t batch, int64_t size, Real value) {
        testing::enqueue(stream, [] { std::this_thread::sleep_for(kStep); });
        stream.kernels().fill(stream, value, loss);
        log.step({.index = batch, .global_size = size}, loss, {health});
      };
      Tensor::empty(stream, {1 << 20});  // before training: not of its peak
      most = device->memory().peak();
      log.begin_epoch(1, 2);
      Tensor::empty(stream, {1000});  // gone before the next epoch
      in_use = device->memory().current();
      step(2, 4, Real(0.5));
      step(3, 4, Real(0.25));
      step(4, 4, Real(0.75));
      log.end_epoch();
      log.evaluated({.loss = 0.75, .correct = 3, .samples = 8});
      log.begin_epoch(2);
      step(0, 2, Real(0.125));
      log.end_epoch();
      log.evaluated({.loss = 0.5, .correct = 5, .samples = 8});
      log.note("more", "a text", "noted", 7);
      own_steps = log.own_steps();
      late.kernels().fill(late, 1, other_loss);
      late.synchronize();
      log.finish(1000);
      last = device->memory().current();
      for (const Stream& lane : {stream, late}) spans.push_back(lane.backend().timeline());
      device_text = device->description();
    }
    metrics = read_json(folder / "metrics");
    trace = read_json(folder / "trace");
    output = testing::read_text(folder / "output");
    seconds = testing::seconds_since(begin);
  }

  json metrics, trace;
  std::string output, device_text;
  std::vector<std::vector<Span>> spans;  // by stream
  int64_t own_steps = 0, in_use = 0;     // in_use: bytes, while it trains
  int64_t most = 0, last = 0;            // bytes, before it trains and at the end
  double seconds = 0;                    // that all of it took
};

TEST_CASE("The log of a run that goes on counts from where it goes on", "[log]") {
  const TempDir folder;
  const std::string output = Told(folder).output;
  for (const char* line :
       {"a stage: resnet18 on cpu:0,cpu:7, cpu (",
        "\nnumbers: 20 training and 8 test images of 2x3x1; 1234 parameters\n\n",
        "\nTrain Epoch: 2 [8/20 (40%)]\tLoss: 0.500000\nTrain Epoch: 2 [16/20 (80%)]\tLoss: "
        "0.750000\n\nTest set: Average loss: 0.7500, Accuracy: 3/8 (37.50%)\n\nTrain Epoch: 3 "
        "[0/20 (0%)]\tLoss: 0.125000\n\nTest set: "
        "Average loss: 0.5000, Accuracy: 5/8 (62.50%)\n\nSummary\n",
        "\n  devices             cpu:0,cpu:7\n", "\n  global batch        4\n", " s (last of 2)\n",
        "\n  test accuracy       62.50 %\n", "\n  more                a text\n"}) {
    CHECK_THAT(output, ContainsSubstring(line));
  }
}

TEST_CASE("The metrics are those of the whole run and of all ranks", "[log]") {
  const TempDir folder;
  const Told told(folder);
  const json& metrics = told.metrics;
  CHECK(metrics.at("stage") == "a stage");
  CHECK(metrics.at("config").at("log_interval") == 2);
  CHECK(metrics.at("devices") == json{"cpu:0", "cpu:7"});
  CHECK(metrics.at("backend") == told.device_text);
  CHECK(metrics.at("batch_size") == 4);
  CHECK(metrics.at("epochs") == 2);
  CHECK(metrics.at("steps") == 3 + 4);
  CHECK(told.own_steps == 4);
  CHECK(metrics.at("losses") == json{0.5, 0.25, 0.75, 0.125});
  CHECK(metrics.at("accuracy") == json{0.375, 0.625});
  CHECK(metrics.at("test_loss") == json{0.75, 0.5});
  CHECK(metrics.at("noted") == 7);
  const auto seconds = metrics.at("epoch_seconds").get<std::vector<double>>();
  REQUIRE(seconds.size() == 2);
  for (const double epoch : seconds) CHECK(epoch > 0);
  const double all = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  CHECK(all <= told.seconds);
  CHECK(metrics.at("samples_per_second").get<double>() * all == Approx(4 + 4 + 4 + 2));
  const auto steps = metrics.at("step_seconds").get<std::vector<double>>();
  REQUIRE(steps.size() == 4);
  CHECK(std::accumulate(steps.begin(), steps.end(), 0.0) <= all);
  for (const double step : steps) CHECK(step > 0.9 * std::chrono::duration<double>(kStep).count());
  CHECK(metrics.at("training_flops") == 3000);
  const int64_t peak = told.in_use + 1000 * int64_t{sizeof(Real)};
  CHECK(metrics.at("peak_memory_bytes") == json{peak, 2 * peak});
  CHECK(metrics.at("peak_rss_bytes").get<int64_t>() % 1024 == 1);  // rank 1's: the system has KiB
  CHECK(metrics.at("startup_seconds").get<double>() > 0);
  // The summary shows the same.
  const std::string rss =
      fmt::format("{:.1f} MiB\n", metrics.at("peak_rss_bytes").get<double>() / 1048576);
  for (const std::string& row :
       {fmt::format("\n  samples/s           {:.0f}\n",
                    metrics["samples_per_second"].get<double>()),
        fmt::format("\n  first step after    {:.2f} s\n", metrics["startup_seconds"].get<double>()),
        fmt::format("\n  epoch time          {:.2f} s (last", seconds[1]),
        "\n  process             " + rss}) {
    CHECK_THAT(told.output, ContainsSubstring(row));
  }
}

TEST_CASE("The trace has every span of every stream, at its time", "[log]") {
  const TempDir folder;
  const Told told(folder);
  const int64_t zero = told.trace.at("otherData").at("zero_ns");
  std::vector<std::vector<json>> slices(told.spans.size());
  for (const json& event : told.trace.at("traceEvents")) {
    if (event.at("ph") == "X") slices.at(event.at("tid")).push_back(event);
  }
  for (size_t lane = 0; lane < slices.size(); ++lane) {
    REQUIRE(slices[lane].size() == told.spans[lane].size());
    for (size_t i = 0; i < slices[lane].size(); ++i) {
      const Span& span = told.spans[lane][i];
      const json& slice = slices[lane][i];
      CHECK(slice.at("name") == span.op);
      CHECK(slice.at("pid") == 0);
      CHECK(slice.at("ts").get<double>() * 1e3 == Approx(double(span.begin_ns - zero)).margin(1));
      CHECK(slice.at("dur").get<double>() * 1e3 ==
            Approx(double(span.end_ns - span.begin_ns)).margin(1));
      CHECK(slice.at("args").at("queued").get<double>() * 1e3 ==
            Approx(double(span.queued_ns - zero)).margin(1));
      CHECK(0 < span.queued_ns);
      CHECK(span.queued_ns <= span.begin_ns);
      if (i > 0) CHECK(span.queued_ns >= told.spans[lane][i - 1].queued_ns);
    }
  }
  CHECK(slices[0].size() > 3);
  CHECK(slices[1].size() == 1);
}

TEST_CASE("The trace has the bytes in use from each allocation and free of any stream on",
          "[log]") {
  const TempDir folder;
  const Told told(folder);
  std::vector<double> times;
  std::vector<int64_t> bytes;
  for (const json& event : told.trace.at("traceEvents")) {
    if (event.at("ph") != "C") continue;
    CHECK(event.at("name") == "memory");
    CHECK(event.at("pid") == 0);
    times.push_back(event.at("ts"));
    bytes.push_back(event.at("args").at("bytes"));
  }
  REQUIRE(bytes.size() > 4);
  CHECK(times.front() == 0);  // nothing is traced before the first memory
  CHECK(std::is_sorted(times.begin(), times.end()));
  CHECK(std::ranges::max(bytes) == told.most);
  CHECK(bytes.back() == told.last);
}

TEST_CASE("Beside rank 0 a rank writes a trace alone, whose devices have numbers of their own",
          "[log]") {
  const TempDir folder;
  const auto first = open_device({DeviceId::Kind::cpu, 0}, {.trace = true}),
             second = open_device({DeviceId::Kind::cpu, 1}, {.trace = true});
  const Stream stream = first->create_stream("compute");
  for (const char* name : {"other", "communication"}) second->create_stream(name);
  Options options;
  options.metrics = folder / "metrics";
  options.trace = folder / "trace";
  {
    const CapturedOutput output(folder / "output");
    TrainingLog log("a stage", options, stream, {first.get(), second.get()}, 20,
                    {3, with_other_ranks, {}});
    log.say("a line");
    log.evaluated({.loss = 0.75, .correct = 3, .samples = 8});
    log.finish(1000);
  }
  CHECK(testing::read_text(folder / "output").empty());
  CHECK(folder.names() == testing::Words{"output", "trace.rank3"});
  const json trace = read_json(folder / "trace.rank3");
  std::vector<json> labels;
  for (const json& event : trace.at("traceEvents")) {
    labels.push_back({event.at("name"), event.at("pid"), event.at("tid"), event["args"]["name"]});
  }
  CHECK(labels == std::vector<json>{{"process_name", 6, 0, "cpu:0"},
                                    {"thread_name", 6, 0, "compute"},
                                    {"process_name", 7, 0, "cpu:1"},
                                    {"thread_name", 7, 0, "other"},
                                    {"thread_name", 7, 1, "communication"}});
}

TEST_CASE("Where nothing was trained, the peak of memory is that of the whole run", "[log]") {
  const TempDir folder;
  const auto device = open_device({DeviceId::Kind::cpu, 0}, {});
  const Stream stream = device->create_stream("compute");
  Tensor::empty(stream, {1000});
  Options options;
  options.metrics = folder / "metrics";
  {
    const CapturedOutput output(folder / "output");
    TrainingLog log("a stage", options, stream, {device.get()}, 20);
    log.evaluated({.loss = 0.75, .correct = 3, .samples = 8});
    log.finish(0);
  }
  const int64_t peak = read_json(folder / "metrics").at("peak_memory_bytes").at(0);
  CHECK(peak >= 1000 * int64_t{sizeof(Real)});
}

TEST_CASE("A step that failed is told by its number, on the rank whose loss it was", "[log]") {
  const auto device = open_device({DeviceId::Kind::cpu, 0}, {});
  const Stream stream = device->create_stream("compute");
  Options options;
  options.lr = 0.5;
  const Tensor loss = Tensor::from_host(stream, {1}, {std::numeric_limits<Real>::infinity()});
  Health failed;
  failed.failed_step = 2;
  Health later;
  later.failed_step = 4;
  const auto good = HealthTensor::from_host(stream, {}, {Health{}}),
             bad = HealthTensor::from_host(stream, {}, {failed}),
             worse = HealthTensor::from_host(stream, {}, {later});
  TrainingLog log("a stage", options, stream, {device.get()}, 20);
  log.begin_epoch(0);
  log.step({.global_size = 4}, loss, {worse, good, bad});
  CHECK_THAT(message_of<NonFinite>([&] { log.settle(); }),
             ContainsSubstring("step 2, rank 0 (cpu:0): the loss (inf) or a gradient") &&
                 ContainsSubstring("lower --lr (0.5)"));
  CHECK_THAT(message_of<NonFinite>(
                 [&] { log.evaluated({.loss = std::numeric_limits<double>::quiet_NaN()}); }),
             ContainsSubstring("after 1 steps, rank 0 (cpu:0): the test loss (nan)"));
}

}  // namespace
}  // namespace lockstep
