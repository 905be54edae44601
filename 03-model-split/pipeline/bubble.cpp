// Measures the bubble: pipelines of equal layers, compared with the formula (p-1)/(Vm+p-1), where V
// is 1 in all schedules but the interleaved one.
//
// The formula assumes stages that take equally long; a real network cannot be cut into such stages.
// This network has equal layers: convolutions, or, for more stages than the machine has cores,
// layers that only sleep. `lockstep show` draws such a pipeline's trace.

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
#include "common/training/trace.h"

namespace lockstep {
namespace {

constexpr int64_t kClasses = 10;

struct BubbleOptions {
  std::string devices = "cpu:0,cpu:1";
  std::vector<int> stages{1, 2};
  std::vector<int> micro_batches{1, 2, 4, 8, 16};
  std::vector<ScheduleKind> schedules{ScheduleKind::naive, ScheduleKind::gpipe,
                                      ScheduleKind::one_f1b, ScheduleKind::interleaved};
  int layers = 8;
  int64_t batch_size = 64;
  int chunks = 2;       // in the interleaved schedule
  double sleep_ms = 0;  // 0: convolutions
  int steps = 10;
  std::string metrics, trace;
};

/// Takes time but no core: `ms` for a whole batch forward, twice that backward. Its one parameter
/// is there to be updated, as a real layer's are.
class Sleep final : public Module {
 public:
  Sleep(double ms, int64_t batch_size)
      : parameter_(add_parameter("bias", ParameterKind::bias, {1}, 1)),
        ms_(ms),
        batch_(batch_size) {}
  AnyTensor forward(const AnyTensor& x, Context& context) override {
    return after(x, ms_, context);
  }
  AnyTensor backward(const AnyTensor& dy, Context& context) override {
    Tensor dx = after(dy, 2 * ms_, context);
    gradient_written(parameter_, context);
    return dx;
  }

 private:
  Tensor after(const Tensor& x, double ms, Context& context) const {
    const auto ns = int64_t(1e6 * ms * double(x.shape()[0]) / double(batch_));
    StreamBackend& stream = context.stream().backend();
    if (context.stream().device().computes()) {
      static_cast<CpuStream&>(stream).enqueue(
          "sleep", [ns] { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); });
    } else {
      static_cast<SimStream&>(stream).enqueue("sleep", ns);
    }
    return x;
  }
  Parameter& parameter_;
  double ms_;
  int64_t batch_;  // the samples for which it sleeps so long
};

/// The network's input: noise, as large as one layer's activation, so that the first layer is like
/// the others.
Dataset noise(const BubbleOptions& options) {
  Dataset set;
  set.height = set.width = options.sleep_ms > 0 ? 2 : 14;
  set.channels = options.sleep_ms > 0 ? 1 : 32;
  set.classes = kClasses;
  for (int64_t i = 0; i < options.batch_size; ++i) set.labels.push_back(uint8_t(i % kClasses));
  for (int64_t i = 0; i < options.batch_size * set.image_bytes(); ++i) {
    set.images.push_back(uint8_t(i * 2654435761u >> 13));  // Knuth's multiplicative hash
  }
  return set;
}

/// Equal layers, and a small last part that turns their output into scores.
Layers equal_layers(const BubbleOptions& options, const Dataset& set) {
  Layers layers;
  const auto add = [&](const std::string& name, std::unique_ptr<Module> layer) {
    layer->set_name(name);
    layers.push_back(std::move(layer));
  };
  for (int i = 0; i < options.layers; ++i) {
    std::unique_ptr<Module> layer = std::make_unique<Sleep>(options.sleep_ms, options.batch_size);
    if (options.sleep_ms == 0) {
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

Pipeline make_pipeline(const BubbleOptions& options, const Dataset& set, Loss& loss,
                       const std::vector<Stream>& streams, const PipelineOptions& how) {
  const int stages = int(streams.size()) * chunks_of(options, how.schedule);
  Cuts cuts;
  for (int s = 1; s < stages; ++s) cuts.push_back(size_t(s * options.layers / stages));
  Pipeline pipeline(std::make_unique<StagedNetwork>(equal_layers(options, set), cuts, streams),
                    loss, set, {}, how);
  pipeline.initialize(Initializer::kaiming_uniform, 1);
  return pipeline;
}

Measurement measure(const BubbleOptions& options, const Dataset& set, int device_count,
                    const PipelineOptions& how) {
  std::vector<DeviceId> ids = parse_devices(options.devices);
  ids.resize(device_count);
  const Devices devices = open_devices(ids, {.trace = !options.trace.empty()});
  const std::unique_ptr<Loss> loss = make_cross_entropy_loss();
  const std::vector<Stream> streams = create_streams(devices, "compute");
  Pipeline pipeline = make_pipeline(options, set, *loss, streams, how);
  DataLoader loader(set, {.batch_size = options.batch_size});
  const auto train = [&](int steps) {
    for (int i = 0; i < steps; ++i) {
      loader.begin_epoch(i);
      pipeline.feed(*loader.next(), {.loss_weight = Real(1) / Real(options.batch_size)});
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
  if (!options.trace.empty()) write_trace(options.trace, pointers_to(devices));
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
  std::vector<int> live;
  for (int device = 0; device < stages; ++device) {
    live.push_back(predicted_live(how.schedule, stages, how.micro_batches, device, chunks));
  }
  return {{"stages", stages},
          {"schedule", name_of(how.schedule)},
          {"chunks", chunks},
          {"micro_batches", how.micro_batches},
          {"step_seconds", found.step_seconds},
          {"bubble", {{"measured", found.bubble}, {"predicted", predicted}}},
          {"predicted_live_activations", live},
          {"peak_memory_bytes", found.peak_memory_bytes}};
}

void check(const BubbleOptions& options) {
  const std::vector<DeviceId> ids = parse_devices(options.devices);
  for (const int stages : options.stages) {
    require(options.layers % stages == 0,
            "--stages: {} cannot have equally many of {} layers; give a divisor of the number of "
            "layers, or other --layers",
            stages, options.layers);
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
bool is_possible(ScheduleKind schedule, int devices, int micro_batches,
                 const BubbleOptions& options) {
  if (schedule == ScheduleKind::naive) return micro_batches == 1;
  return schedule != ScheduleKind::interleaved ||
         (devices > 1 && micro_batches % devices == 0 &&
          options.layers % (devices * options.chunks) == 0);
}

/// A pipeline that is asked for.
struct Asked {
  int stages;
  PipelineOptions how;
};

std::vector<Asked> possible_of(const BubbleOptions& options) {
  const size_t combinations =
      options.stages.size() * options.schedules.size() * options.micro_batches.size();
  std::vector<Asked> all;
  for (const int stages : options.stages) {
    for (const ScheduleKind schedule : options.schedules) {
      for (const int micro_batches : options.micro_batches) {
        // One alone is tried: then its own refusal says what is wrong.
        if (combinations > 1 && !is_possible(schedule, stages, micro_batches, options)) continue;
        all.push_back({stages, {schedule, micro_batches}});
      }
    }
  }
  require(!all.empty(),
          "--schedules: none is possible with these --stages, --chunks and --micro-batches; give "
          "gpipe or 1f1b");
  require(
      all.size() == 1 || options.trace.empty(),
      "--trace: draws one pipeline, found {}; give one value each for --stages, --schedules and "
      "--micro-batches",
      all.size());
  return all;
}

void measure_all(const BubbleOptions& options) {
  check(options);
  const Dataset set = noise(options);
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& [stages, how] : possible_of(options)) {
    rows.push_back(row(options, set, stages, how));
  }
  if (!options.metrics.empty()) write_json(options.metrics, rows);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::hold_standard_streams();
  lockstep::report_uncaught_errors();
  lockstep::BubbleOptions options;
  lockstep::OptionParser parser("bubble", "Measures the bubble of pipelines of equal layers.");
  parser.add("--devices", options.devices, "one per stage; sim:4: simulated ones");
  parser.add("--stages", options.stages, "numbers of stages (1,2)", {1, 64});
  parser.add("--layers", options.layers, "layers of the network, a multiple of the stages",
             {1, 1024});
  parser.add("--micro-batches", options.micro_batches, "numbers of micro-batches (1,2,4)",
             {1, 1024});
  parser.add("--batch-size", options.batch_size, "samples of a batch", {1, 1024});
  parser.add("--schedules", options.schedules,
             "orders of the micro-batches' forwards and backwards");
  parser.add("--chunks", options.chunks, "stages on a device if interleaved", {2, 16});
  parser.add("--sleep", options.sleep_ms,
             "milliseconds that a layer sleeps instead of computing, forward, per batch",
             {0, 1000});
  parser.add("--steps", options.steps, "steps of each pipeline", {1, 10000});
  parser.add_output("--metrics", options.metrics, "write the rows to this file, as JSON");
  parser.add_output("--trace", options.trace, "write a timeline of one pipeline");
  if (parser.parse(argc, argv)) lockstep::measure_all(options);
  lockstep::require_printed();
}
