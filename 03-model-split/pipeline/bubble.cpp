// Measures the bubble: pipelines of equal layers, compared with the formula (p-1)/(Vm+p-1), where V
// is 1 in all schedules but the interleaved one.
//
// The formula assumes stages that take equally long; a real network cannot be cut into such stages.
// This network has equal layers: convolutions, or, for more stages than the machine has cores,
// layers that only sleep.

#include <fmt/ranges.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "03-model-split/pipeline/pipeline.h"
#include "common/core/cpu_stream.h"
#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/json.h"
#include "common/kernels/devices.h"
#include "common/kernels/sim/sim_stream.h"
#include "common/nn/layers.h"
#include "common/options/option_parser.h"
#include "common/options/options.h"
#include "common/options/report.h"

namespace lockstep {
namespace {

constexpr int kLayers = 8;
constexpr int64_t kBatch = 64, kClasses = 10;

struct BubbleOptions {
  std::string devices = "cpu:0,cpu:1";
  std::vector<int> stages{1, 2};
  std::vector<int> micro_batches{1, 2, 4, 8, 16};
  std::vector<ScheduleKind> schedules{ScheduleKind::naive, ScheduleKind::gpipe,
                                      ScheduleKind::one_f1b, ScheduleKind::interleaved};
  int chunks = 2;       // in the interleaved schedule
  double sleep_ms = 0;  // 0: convolutions
  int steps = 10;
  std::string metrics;
};

/// Takes time but no core: `ms` for a whole batch forward, twice that backward.
class Sleep final : public Module {
 public:
  explicit Sleep(double ms) : ms_(ms) {}
  Tensor forward(const Tensor& x, Context& context) override { return after(x, ms_, context); }
  Tensor backward(const Tensor& dy, Context& context) override {
    return after(dy, 2 * ms_, context);
  }

 private:
  static Tensor after(const Tensor& x, double ms, Context& context) {
    const auto ns = int64_t(1e6 * ms * double(x.shape()[0]) / kBatch);
    StreamBackend& stream = context.stream().backend();
    if (context.stream().device().computes()) {
      static_cast<CpuStream&>(stream).enqueue(
          "sleep", [ns] { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); });
    } else {
      static_cast<SimStream&>(stream).enqueue("sleep", ns);
    }
    return x;
  }
  double ms_;
};

/// The network's input: noise, as large as one layer's activation, so that the first layer is like
/// the others.
Dataset noise(const BubbleOptions& options) {
  Dataset set;
  set.height = set.width = options.sleep_ms > 0 ? 2 : 14;
  set.channels = options.sleep_ms > 0 ? 1 : 32;
  set.classes = kClasses;
  for (int64_t i = 0; i < kBatch; ++i) set.labels.push_back(uint8_t(i % kClasses));
  for (int64_t i = 0; i < kBatch * set.image_bytes(); ++i) {
    set.images.push_back(uint8_t(i * 2654435761u >> 13));  // Knuth's multiplicative hash
  }
  return set;
}

/// kLayers equal layers, and a small last part that turns their output into scores.
Layers equal_layers(const Dataset& set, double sleep_ms) {
  Layers layers;
  const auto add = [&](const std::string& name, std::unique_ptr<Module> layer) {
    layer->set_name(name);
    layers.push_back(std::move(layer));
  };
  for (int i = 0; i < kLayers; ++i) {
    std::unique_ptr<Module> layer = std::make_unique<Sleep>(sleep_ms);
    if (sleep_ms == 0) {
      layer = std::make_unique<Conv2d>(set.channels, set.channels,
                                       Conv2d::Options{.kernel = 3, .stride = 1, .padding = 1});
    }
    add("layer" + std::to_string(i), std::move(layer));
  }
  add("flatten", std::make_unique<Flatten>());
  add("scores", std::make_unique<Linear>(set.image_bytes(), kClasses));
  return layers;
}

/// The measurements of one pipeline.
struct Measurement {
  double step_seconds, bubble;
  std::vector<int64_t> peak_memory_bytes;  // per device
};

/// How many stages each device has.
int chunks_of(const BubbleOptions& options, ScheduleKind schedule) {
  return schedule == ScheduleKind::interleaved ? options.chunks : 1;
}

Measurement measure(const BubbleOptions& options, const Dataset& set, int device_count,
                    const PipelineOptions& how) {
  std::vector<DeviceId> ids = parse_devices(options.devices);
  ids.resize(device_count);
  const Devices devices = open_devices(ids, {});
  const int stages = device_count * chunks_of(options, how.schedule);
  Cuts cuts;
  for (int s = 1; s < stages; ++s) cuts.push_back(size_t(s * kLayers / stages));
  const std::unique_ptr<Loss> loss = make_cross_entropy_loss();
  const std::vector<Stream> streams = create_streams(devices, "compute");
  Pipeline pipeline(
      std::make_unique<StagedNetwork>(equal_layers(set, options.sleep_ms), cuts, streams), *loss,
      set, {}, how);
  pipeline.initialize(Initializer::kaiming_uniform, 1);
  DataLoader loader(set, {.batch_size = kBatch});
  const auto train = [&](int steps) {
    for (int i = 0; i < steps; ++i) {
      loader.begin_epoch(i);
      pipeline.feed(*loader.next(), {.loss_weight = Real(1) / kBatch});
      pipeline.zero_gradients();
      pipeline.run_schedule();
      pipeline.update();
    }
    for (const Stream& stream : streams) stream.synchronize();
  };
  train(2);  // makes the primitives and touches new memory
  pipeline.restart_clocks();
  const int64_t begin = devices[0]->now_ns();
  train(options.steps);
  const double seconds = double(devices[0]->now_ns() - begin) * 1e-9;
  Measurement measured{seconds / options.steps, pipeline.measured_bubble(), {}};
  for (const auto& device : devices) measured.peak_memory_bytes.push_back(device->memory().peak());
  return measured;
}

/// Prints a row and returns it as JSON.
nlohmann::json row(const BubbleOptions& options, const Dataset& set, int stages,
                   const PipelineOptions& how) {
  const Measurement found = measure(options, set, stages, how);
  const int chunks = chunks_of(options, how.schedule);
  const double predicted = predicted_bubble(stages, how.micro_batches, chunks);
  std::vector<std::string> peaks;
  for (const int64_t bytes : found.peak_memory_bytes) {
    peaks.push_back(fmt::format("{:.1f}", mebibytes(bytes)));
  }
  print_clean(
      "{} stages, {:<11} {:>2} micro-batch{:<2}  {:8.2f} ms/step  bubble {:5.1f} %, "
      "formula {:5.1f} %  {} MiB\n",
      stages, name_of(how.schedule), how.micro_batches, how.micro_batches == 1 ? "" : "es",
      1e3 * found.step_seconds, 100 * found.bubble, 100 * predicted, fmt::join(peaks, ", "));
  std::fflush(stdout);
  return {{"stages", stages},
          {"schedule", name_of(how.schedule)},
          {"chunks", chunks},
          {"micro_batches", how.micro_batches},
          {"step_seconds", found.step_seconds},
          {"bubble", {{"measured", found.bubble}, {"predicted", predicted}}},
          {"peak_memory_bytes", found.peak_memory_bytes}};
}

void check(const BubbleOptions& options) {
  const std::vector<DeviceId> ids = parse_devices(options.devices);
  for (const int stages : options.stages) {
    require(kLayers % stages == 0,
            "--stages: {} cannot have equally many of {} layers; give 1, 2, 4 or 8", stages,
            kLayers);
    require(size_t(stages) <= ids.size(),
            "--stages: {} of the {} devices in --devices {}; name one device per stage", stages,
            ids.size(), options.devices);
  }
  for (const DeviceId& id : ids) {
    require(options.sleep_ms == 0 || id.kind != DeviceId::Kind::cuda,
            "--sleep: {} cannot sleep, expected CPU devices or simulated ones; leave out --sleep",
            id.name());
  }
}

/// The interleaved schedule needs neighbours, as many micro-batches as devices, or a multiple, and
/// a layer or more for every stage.
bool is_possible(ScheduleKind schedule, int devices, int micro_batches, int chunks) {
  if (schedule == ScheduleKind::naive) return micro_batches == 1;
  return schedule != ScheduleKind::interleaved ||
         (devices > 1 && micro_batches % devices == 0 && kLayers % (devices * chunks) == 0);
}

void measure_all(const BubbleOptions& options) {
  check(options);
  const Dataset set = noise(options);
  nlohmann::json rows = nlohmann::json::array();
  for (const int stages : options.stages) {
    for (const ScheduleKind schedule : options.schedules) {
      for (const int micro_batches : options.micro_batches) {
        if (!is_possible(schedule, stages, micro_batches, options.chunks)) continue;
        rows.push_back(row(options, set, stages, {schedule, micro_batches}));
      }
    }
  }
  require(!rows.empty(),
          "--schedules: none is possible with these --stages, --chunks and --micro-batches; give "
          "gpipe or 1f1b");
  if (!options.metrics.empty()) write_json(options.metrics, rows);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::hold_standard_streams();
  lockstep::report_uncaught_errors();
  lockstep::BubbleOptions options;
  lockstep::OptionParser parser("bubble",
                                "Measures the bubble of pipelines of eight equal layers.");
  parser.add("--devices", options.devices, "one per stage; sim:4: simulated ones");
  parser.add("--stages", options.stages, "numbers of stages (1,2)", {1, lockstep::kLayers});
  parser.add("--micro-batches", options.micro_batches, "numbers of micro-batches (1,2,4)", {1, 64});
  parser.add("--schedules", options.schedules, "how micro-batches take turns");
  parser.add("--chunks", options.chunks, "stages on a device if interleaved", {2, 4});
  parser.add("--sleep", options.sleep_ms,
             "milliseconds that a layer sleeps instead of computing, forward, per batch",
             {0, 1000});
  parser.add("--steps", options.steps, "steps of each pipeline", {1, 10000});
  parser.add_output("--metrics", options.metrics, "write the rows to this file, as JSON");
  if (parser.parse(argc, argv)) lockstep::measure_all(options);
  lockstep::require_printed();
}
