#pragma once
// Networks in pieces, and pipelines that train, compared with one device.

#include "03-model-split/pipeline/pipeline.h"

#include <chrono>
#include <limits>
#include <random>
#include <thread>

#include "common/core/error.h"
#include "common/nn/state_dict.h"
#include "tests/support/data_test_files.h"
#include "tests/support/machine.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tasks.h"
#include "tests/support/training.h"

namespace lockstep::testing::pipelines {

constexpr ScheduleKind kNaive = ScheduleKind::naive, kGpipe = ScheduleKind::gpipe,
                       kOneF1b = ScheduleKind::one_f1b, kInterleaved = ScheduleKind::interleaved;

// --- Networks in pieces --------------------------------------------------------------------------

inline Layers layers_of(const ModelOptions& options) {
  return static_cast<Sequential&>(*make_model(options).network).release_layers();
}

/// A network for images of 16x16: a tenth of the work.
inline ModelOptions small(bool dropout = false, ModelKind kind = ModelKind::seed) {
  return {.kind = kind, .dropout = dropout, .height = 16, .width_pixels = 16};
}

inline std::vector<std::string> names_of(const Layers& layers) {
  std::vector<std::string> names;
  for (const auto& layer : layers) names.push_back(layer->name());
  return names;
}

/// The cuts into `stages` stages with about equally many layers.
inline Cuts even_cuts(size_t layers, size_t stages) {
  Cuts cuts;
  for (size_t s = 1; s < stages; ++s) cuts.push_back(s * layers / stages);
  return cuts;
}

/// Cuts a network into `chunks` stages on each stream, with first values of seed 1.
inline std::unique_ptr<StagedNetwork> split_of(Layers layers, const std::vector<Stream>& streams,
                                               int chunks = 1,
                                               Precision precision = Precision::real) {
  const Cuts cuts = even_cuts(layers.size(), streams.size() * size_t(chunks));
  auto split = std::make_unique<StagedNetwork>(std::move(layers), cuts, streams, precision);
  for (const StagedNetwork::Stage& stage : split->stages()) {
    initialize(*stage.parameters, Initializer::kaiming_uniform, 1);
  }
  return split;
}

/// The values, or gradients, of all parameters in order of registration.
template <class Member>
std::vector<Real> all_of(Module& network, Member which) {
  std::vector<Real> all;
  for (const Parameter* p : network.parameters()) {
    const std::vector<Real> values = (p->*which).to_host();
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

/// Running statistics, and the number of batches that they cover.
inline std::vector<Real> statistics_of(Module& network) {
  std::vector<Real> all;
  for (const StateTensor& tensor : state_dict(network)) {
    if (tensor.name.find("running") != std::string::npos) {
      all.insert(all.end(), tensor.real.begin(), tensor.real.end());
    }
    for (const int64_t number : tensor.integer) all.push_back(Real(number));
  }
  return all;
}

/// Passes everything on and acts on the way.
class Hook final : public Module {
 public:
  using Action = std::function<void(Stream)>;
  explicit Hook(Action forward, Action backward = {})
      : forward_(std::move(forward)), backward_(std::move(backward)) {}
  AnyTensor forward(const AnyTensor& x, Context& context) override {
    if (forward_) forward_(context.stream());
    return x;
  }
  AnyTensor backward(const AnyTensor& dy, Context& context) override {
    if (backward_) backward_(context.stream());
    return dy;
  }

 private:
  Action forward_, backward_;
};

inline Hook::Action sleep(int ms) {
  return [ms](Stream stream) {
    enqueue(stream, "sleep", [ms] { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); });
  };
}

/// Puts a hook before layer `place`.
inline void insert(Layers& layers, size_t place, Hook::Action forward, Hook::Action backward) {
  auto hook = std::make_unique<Hook>(std::move(forward), std::move(backward));
  hook->set_name("hook");
  layers.insert(layers.begin() + static_cast<std::ptrdiff_t>(place), std::move(hook));
}

// --- Training ------------------------------------------------------------------------------------

constexpr int64_t kBatch = 12;

/// Three batches of noise.
inline const Dataset& images() {
  static const Dataset set = [] {
    Dataset noise;
    noise.height = noise.width = 16;
    noise.channels = 1;
    noise.classes = 10;
    noise.mean = noise.stddev = 0.5;
    std::mt19937 random(1);
    for (int i = 0; i < 3 * kBatch; ++i) noise.labels.push_back(random() % 10);
    for (int i = 0; i < 3 * kBatch * 16 * 16; ++i) noise.images.push_back(random() % 256);
    return noise;
  }();
  return set;
}

/// A loss that is infinite in step 1, while its gradient is correct.
class Infinite final : public Loss {
 public:
  explicit Infinite(const int64_t& steps) : steps_(steps) {}
  void forward(const AnyTensor& scores, const LabelTensor& labels, const Tensor& loss,
               Context& context) override {
    inner_->forward(scores, labels, loss, context);
    if (steps_ != 2) return;
    context.kernels().fill(context.stream(), std::numeric_limits<Real>::infinity(), loss);
  }
  AnyTensor backward(const LabelTensor& labels, Context& context) override {
    return inner_->backward(labels, context);
  }

 private:
  const int64_t& steps_;  // begun
  std::unique_ptr<Loss> inner_ = make_nll_loss();
};

/// The result of three steps.
struct Outcome {
  std::vector<Real> losses, weights, gradients, statistics;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

inline double error(const Outcome& found, const Outcome& expected) {
  return std::max({relative_error(found.losses, expected.losses),
                   relative_error(found.weights, expected.weights),
                   relative_error(found.gradients, expected.gradients)});
}

inline Outcome outcome(Module& network, std::vector<Real> losses) {
  return {std::move(losses), all_of(network, &Parameter::value), all_of(network, &Parameter::grad),
          statistics_of(network)};
}

/// Trains on one device, as stage 01 does.
inline Outcome single_device(const ModelOptions& model, const OptimizerRule& rule) {
  const Machine machine(cpus(1));
  testing::Training training(machine.streams[0], images(),
                             {.model = model, .rule = rule, .batch_size = kBatch});
  const std::vector<double> losses = training.epoch();
  return outcome(*training.model.network, std::vector<Real>(losses.begin(), losses.end()));
}

struct Setup {
  int stages = 3;  // or devices of several
  PipelineOptions pipeline{};
  ModelOptions model = small();
  OptimizerRule rule{};
  std::vector<int64_t> sizes{};           // of the micro-batches; empty: the pipeline's own
  std::function<void(Layers&)> change{};  // of the layers, before they are cut
  bool infinite_loss = false;
  int chunks = 1;  // stages of each device
};

/// A pipeline with seed 1 and its batches. The loader is destroyed last: when a step ends in an
/// exception, copies from its memory are still queued.
struct Run {
  explicit Run(const Setup& options) : setup(options), machine(cpus(options.stages)) {
    Layers layers = layers_of(setup.model);
    if (setup.change) setup.change(layers);
    auto pieces =
        split_of(std::move(layers), machine.streams, setup.chunks, setup.pipeline.precision);
    split = pieces.get();
    loss = make_model(setup.model).loss;
    if (setup.infinite_loss) loss = std::make_unique<Infinite>(steps);
    pipeline =
        std::make_unique<Pipeline>(std::move(pieces), *loss, images(), setup.rule, setup.pipeline);
  }

  /// Enqueues a step over the next batch, without waiting for anything.
  void step() {
    std::optional<HostBatch> batch;
    if (steps > 0) batch = loader.next();
    if (!batch) loader.begin_epoch(0);
    if (!batch) batch = loader.next();
    const StepState state{
        .step = steps++, .learning_rate = Real(0.01), .loss_weight = Real(1) / Real(kBatch)};
    std::vector<BatchPart> parts;
    for (int64_t first = 0; const int64_t size : setup.sizes) {
      parts.push_back({first, 1, size});
      first += size;
    }
    if (parts.empty()) {
      pipeline->feed(*batch, state);
    } else {
      pipeline->feed(*batch, parts, state);
    }
    pipeline->zero_gradients();
    pipeline->run_schedule();
    pipeline->update();
    losses.push_back(
        Tensor::empty(pipeline->loss().home(), {1}));  // the next step's takes its place
    losses.back().home().copy(losses.back().data(), pipeline->loss().data(), sizeof(Real));
  }
  Outcome three_steps() {
    for (int i = 0; i < 3; ++i) step();
    std::vector<Real> values;
    for (const Tensor& mean : losses) values.push_back(mean.to_host()[0]);
    return outcome(*split, values);
  }
  /// Most bytes ever in use on each device, workspaces of the layers included.
  std::vector<int64_t> peaks() const {
    for (const Stream& stream : machine.streams) stream.synchronize();
    std::vector<int64_t> all;
    for (const auto& device : machine.devices) all.push_back(device->memory().peak());
    return all;
  }

  Setup setup;
  DataLoader loader{images(), {.batch_size = kBatch}};
  Machine machine;
  std::unique_ptr<Loss> loss;
  StagedNetwork* split;
  std::unique_ptr<Pipeline> pipeline;
  std::vector<Tensor> losses;
  int64_t steps = 0;
};

inline Outcome three_steps(const Setup& setup) { return Run(setup).three_steps(); }

}  // namespace lockstep::testing::pipelines
