#pragma once
// Runs that the tests of checkpoints save and resume: a small training run of several ranks, and a
// network of ten numbers whose files are small.

#include "05-syncbn-checkpoint/checkpointer.h"

#include <algorithm>
#include <map>
#include <optional>

#include "04-ddp/shard_loader.h"
#include "common/core/error.h"
#include "common/io/file.h"
#include "common/kernels/devices.h"
#include "common/nn/init.h"
#include "common/nn/layers.h"
#include "common/nn/models.h"
#include "common/training/feeder.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/local_store.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/process.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tcp_stores.h"

namespace lockstep::testing::checkpoints {

// --- A small training run ------------------------------------------------------------------------

/// 20 images: 4 batches of an epoch, of which the last has 2. Everything that has a state is on:
/// batch normalisation, dropout, momentum, a schedule, an order that changes.
struct RunOptions {
  CheckpointStageOptions options{};
  SavingOptions saving{};
  int64_t steps_per_epoch = 0;
  RunOptions() {
    options.model = ModelKind::seed_bn;
    options.data = "synthetic:20:8";
    options.batch_size = 6;
    options.lr = 0.05;
    options.lr_step = 1;
    options.lr_gamma = 0.7;
    options.momentum = 0.9;
    options.dropout = true;
    options.order = OrderKind::sampler;
    options.workers = 0;
  }
  explicit RunOptions(const std::filesystem::path& directory) : RunOptions() {
    saving.directory = directory;
    saving.say = saving.warn = [](const std::string&) {};
  }
};

constexpr int64_t kStepsPerEpoch = 4;

inline const DatasetPair& training_data() {
  static const DatasetPair& data = *new DatasetPair(load_dataset("synthetic:20:8"));
  return data;
}

/// Everything that two runs may differ in.
struct RunResult {
  std::vector<Real> weights, statistics, optimizer;
  std::vector<int64_t> tracked;
  friend bool operator==(const RunResult&, const RunResult&) = default;
};

/// One rank of the run.
class Trainee {
 public:
  Trainee(Communicator& ranks, const ExchangeTexts& exchange, const RunOptions& run)
      : options(run.options),
        device(open_device({DeviceId::Kind::cpu, ranks.rank()}, {})),
        model(make_model(options.model_options(training_data().train))),
        parameters(*model.network, stream),
        optimizer(parameters, options.optimizer_rule()),
        loader(
            training_data().train, options,
            [this](size_t bytes) { return device->allocate_host(bytes); }, ranks.rank(),
            ranks.world_size(), Sharding::global_batch),
        feeder(stream, training_data().train),
        context(stream),
        run_(run),
        ranks_(ranks),
        exchange_(exchange) {
    initialize(parameters, Initializer::kaiming_uniform, uint64_t(ranks.rank()) + 1);
    replica = std::make_unique<DistributedDataParallel>(std::move(model.network), parameters, ranks,
                                                        exchange, communication);
    begin_saving();
    state.world_size = ranks.world_size();
    state.settings = training_settings(table_of(options), training_data());
  }

  Trained trained() { return {replica->inner(), parameters, optimizer}; }

  /// Trains until `steps` steps are done.
  void train(int64_t steps) {
    for (; state.steps < steps; ++state.epoch, state.step_in_epoch = 0) {
      loader.begin_epoch(state.epoch, state.step_in_epoch);
      while (std::optional<HostBatch> batch = loader.next()) {
        step(std::move(*batch));
        ++state.step_in_epoch;
        if (++state.steps == steps) break;
      }
      if (state.steps == steps) break;  // the epoch stays current, even if it is over
    }
    state.learning_rate = schedule().at(state.steps);
  }
  /// Saves; if that fails, throws the error that a program throws at its end.
  void save() {
    checkpointer->save(state);
    checkpointer->finish();
  }
  void resume(const std::string& source = "auto") {
    run_.saving.resume = source;
    begin_saving();
    state = checkpointer->resume(state);
  }
  RunResult result() {
    std::vector<Real> states;
    for (const OptimizerState& state : optimizer.state()) {
      const std::vector<Real> values = state.ranges.at(0).to_host();
      states.insert(states.end(), values.begin(), values.end());
    }
    return {parameters.values().to_host(), parameters.buffer_values().to_host(), states,
            batches_tracked(replica->inner())};
  }

  CheckpointStageOptions options;
  std::unique_ptr<Device> device;
  Stream stream = device->create_stream("compute");
  Stream communication = device->create_stream("communication");
  Model model;
  FlatParameters parameters;
  Optimizer optimizer;
  ShardLoader loader;
  Feeder feeder;
  Context context;
  std::unique_ptr<DistributedDataParallel> replica;
  std::optional<RankZeroCheckpointer> checkpointer;
  TrainingState state;

 private:
  void begin_saving() {
    checkpointer.emplace(trained(), run_.saving, ranks_, exchange_, run_.steps_per_epoch);
  }
  LearningRateSchedule schedule() const { return options.schedule(kStepsPerEpoch); }

  void step(const HostBatch& batch) {
    context.begin_step({.step = state.steps,
                        .learning_rate = Real(schedule().at(state.steps)),
                        .loss_weight = Real(ranks_.world_size()) / Real(batch.global_size)});
    const Tensor loss = parameters.loss();
    optimizer.zero_gradients();
    const DeviceBatch& part = feeder.feed(batch, context);
    const Tensor scores = replica->forward(feeder.normalize(part, context), context);
    model.loss->forward(scores, part.labels, loss, context);
    replica->backward(model.loss->backward(part.labels, context), context);
    optimizer.step(context.state(), loss);
  }

  RunOptions run_;
  Communicator& ranks_;
  ExchangeTexts exchange_;
};

/// Runs `body` on every rank of a new group; returns each rank's error as text.
template <class Body>
std::vector<std::string> run_group(int world_size,
                                   const std::function<RunOptions(int rank)>& options, Body body) {
  testing::LocalStore store;
  const testing::Ranks ranks = testing::tcp_ranks(world_size);
  return testing::run_ranks(world_size, [&](int rank) {
    const ExchangeTexts exchange = [&, rank](const std::string& mine) {
      return store.exchange(rank, world_size, mine);
    };
    Trainee trainee(*ranks.comms[size_t(rank)], exchange, options(rank));
    body(trainee, rank);
    trainee.stream.synchronize();
  });
}

template <class Body>
std::vector<std::string> run_group(int world_size, const RunOptions& options, Body body) {
  const auto same = [&](int) { return options; };
  return run_group(world_size, same, body);
}

inline Words no_errors(int world_size) { return Words(size_t(world_size), ""); }

/// The ranks' results after `body`; no rank may fail.
template <class Body>
std::vector<RunResult> results_of(int world_size, const RunOptions& options, Body body) {
  std::vector<RunResult> results{size_t(world_size)};
  const Words errors = run_group(world_size, options, [&](Trainee& trainee, int rank) {
    body(trainee);
    results[size_t(rank)] = trainee.result();
  });
  CHECK(errors == no_errors(world_size));
  return results;
}

/// An uninterrupted run.
inline std::vector<RunResult> trained_straight(int world_size, int64_t steps,
                                               const RunOptions& options = RunOptions()) {
  return results_of(world_size, options, [&](Trainee& trainee) { trainee.train(steps); });
}

/// Trains to `steps` and saves there.
inline void train_and_save(int world_size, const RunOptions& options, int64_t steps) {
  results_of(world_size, options, [&](Trainee& trainee) {
    trainee.train(steps);
    trainee.save();
  });
}

inline std::string checkpoint_name(int64_t steps) { return checkpoint_path("", steps).string(); }
inline std::string momentum_name(int64_t steps) {
  return optimizer_path(checkpoint_path("", steps)).string();
}

// --- A network of ten numbers, whose files are small ---------------------------------------------

/// A run whose network and momentum hold numbers that follow from `mark`.
struct SmallRun {
  explicit SmallRun(double mark = 0, double momentum = 0.9)
      : SmallRun(mark, OptimizerRule{.momentum = momentum}) {}
  SmallRun(double mark, const OptimizerRule& rule) : optimizer(parameters, rule) {
    set(mark);
    state.settings = {{"momentum", rule.momentum}, {"seed", 1}};
  }
  static std::unique_ptr<Module> make() {
    auto network = std::make_unique<Sequential>();
    network->add("fc", std::make_unique<Linear>(4, 2));
    network->set_name("");
    return network;
  }
  void set(double mark) {
    state.steps = int64_t(mark);
    device.kernels().fill(device.stream, Real(mark), parameters.values());
    for (const OptimizerState& kept : optimizer.state()) {
      device.kernels().fill(device.stream, Real(-mark), kept.ranges.at(0));
    }
  }
  Trained trained() const { return {*network, parameters, optimizer}; }
  void save(const std::filesystem::path& directory) const {
    save_checkpoint(directory, trained(), state);
  }
  void save(const std::filesystem::path& directory, double mark) {
    set(mark);
    save(directory);
  }
  /// Whether the network is as set(mark) left it. Gaps between parameters do not count.
  bool network_holds(double mark) const {
    return std::ranges::all_of(state_dict(*network), [&](const StateTensor& tensor) {
      return std::ranges::count(tensor.real, Real(mark)) == std::ssize(tensor.real);
    });
  }
  bool holds(double mark) const {
    const auto is_marked = [&](const StateTensor& tensor) {
      return std::ranges::count(tensor.real, Real(-mark)) == std::ssize(tensor.real);
    };
    return network_holds(mark) &&
           std::ranges::all_of(optimizer.state(), [&](const OptimizerState& kept) {
             return std::ranges::all_of(flat_state_dict(parameters, kept.ranges.at(0), ""),
                                        is_marked);
           });
  }

  testing::TestDevice device;
  std::unique_ptr<Module> network = make();
  FlatParameters parameters{*network, device.stream};
  Optimizer optimizer;
  TrainingState state;
};

/// The mark of the newest checkpoint that can be read; -1 if there is none.
inline double newest_mark(const std::filesystem::path& directory) {
  const auto checkpoint = newest_checkpoint(directory, [](const std::string&) {});
  if (!checkpoint) return -1;
  SmallRun run;
  restore(*checkpoint, run.trained());
  const int64_t steps = TrainingState::from_json(checkpoint->training, "it").steps;
  return run.holds(double(steps)) ? double(steps) : std::nan("");
}

/// All files of a directory with their bytes.
inline std::map<std::string, std::string> contents_of(const TempDir& folder) {
  std::map<std::string, std::string> contents;
  for (const std::string& name : folder.names()) contents[name] = read_text(folder / name);
  return contents;
}

}  // namespace lockstep::testing::checkpoints
