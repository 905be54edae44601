// Checkpoints: their files, and groups of ranks that save and resume.

#include "05-syncbn-checkpoint/checkpointer.h"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "04-ddp/shard_loader.h"
#include "05-syncbn-checkpoint/training_settings.h"
#include "common/core/error.h"
#include "common/io/file.h"
#include "common/io/json.h"
#include "common/kernels/devices.h"
#include "common/nn/init.h"
#include "common/nn/layers.h"
#include "common/nn/models.h"
#include "common/step/feeder.h"
#include "common/step/weights_file.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/local_store.h"
#include "tests/support/mutator.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/process.h"
#include "tests/support/rank_threads.h"
#include "tests/support/replaced_system_calls.h"
#include "tests/support/tcp_stores.h"
#include "tests/support/training_state_support.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using nlohmann::json;
using testing::message_of;
using testing::operator+;
using testing::relative_error;
using testing::TempDir;
using testing::Words;

// --- A small training run ------------------------------------------------------------------------

/// 20 images: 4 batches of an epoch, of which the last has 2. Everything that has a state is on:
/// batch normalisation, dropout, momentum, a schedule, an order that changes.
struct RunOptions {
  Options options{};
  CheckpointOptions checkpoints{};
  RunOptions() {
    options.model = "seed-bn";
    options.data = "synthetic:20:8";
    options.batch_size = 6;
    options.lr = 0.05;
    options.lr_step = 1;
    options.lr_gamma = 0.7;
    options.momentum = 0.9;
    options.dropout = true;
    options.order = "sampler";
    options.workers = 0;
  }
  explicit RunOptions(const fs::path& directory) : RunOptions() {
    checkpoints.directory = directory;
    checkpoints.say = checkpoints.warn = [](const std::string&) {};
  }
};

constexpr int64_t kStepsPerEpoch = 4;

const DatasetPair& training_data() {
  static const DatasetPair& data = *new DatasetPair(load_dataset("synthetic:20:8"));
  return data;
}

/// Everything that two runs may differ in.
struct RunResult {
  std::vector<Real> weights, statistics, velocity;
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
        optimizer(parameters, options.sgd_rule()),
        loader(
            training_data().train, options,
            [this](size_t bytes) { return device->allocate_host(bytes); }, ranks.rank(),
            ranks.world_size(), Sharding::global_batch),
        feeder(stream, training_data().train),
        context(stream),
        world_size_(ranks.world_size()) {
    initialize(parameters, Initializer::kaiming_uniform, uint64_t(ranks.rank()) + 1);
    replica = std::make_unique<DistributedDataParallel>(std::move(model.network), parameters, ranks,
                                                        exchange, communication);
    checkpointer = std::make_unique<Checkpointer>(trained(), ranks, exchange, run.checkpoints);
    state.world_size = world_size_;
    state.settings = training_settings(options, DdpStageOptions(), training_data());
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
      if (state.steps == steps) break;  // the epoch stays at hand, even if it is over
    }
    state.learning_rate = schedule().at(state.steps);
  }
  void save() { checkpointer->save(state); }
  void resume(const std::string& source = "auto") { state = checkpointer->resume(source, state); }
  RunResult result() {
    return {parameters.values().to_host(), parameters.buffer_values().to_host(),
            optimizer.velocity().defined() ? optimizer.velocity().to_host() : std::vector<Real>(),
            batches_tracked(replica->inner())};
  }

  Options options;
  std::unique_ptr<Device> device;
  Stream stream = device->create_stream("compute");
  Stream communication = device->create_stream("communication");
  Model model;
  FlatParameters parameters;
  Sgd optimizer;
  ShardLoader loader;
  Feeder feeder;
  Context context;
  std::unique_ptr<DistributedDataParallel> replica;
  std::unique_ptr<Checkpointer> checkpointer;
  TrainingState state;

 private:
  LearningRateSchedule schedule() const { return options.schedule(kStepsPerEpoch); }

  void step(const HostBatch& batch) {
    context.begin_step({.step = state.steps,
                        .learning_rate = Real(schedule().at(state.steps)),
                        .loss_weight = Real(world_size_) / Real(batch.global_size)});
    const Tensor loss = parameters.loss();
    optimizer.zero_gradients();
    const DeviceBatch& part = feeder.feed(batch, context);
    const Tensor scores = replica->forward(feeder.normalize(part, context), context);
    model.loss->forward(scores, part.labels, loss, context);
    replica->backward(model.loss->backward(part.labels, context), context);
    optimizer.step(context.state(), loss);
  }

  int world_size_;
};

/// Runs `body` on every rank of a new group; what each of them threw, as text.
template <class Body>
std::vector<std::string> run_group(int world_size,
                                   const std::function<RunOptions(int rank)>& options, Body body) {
  testing::LocalStore store;
  const testing::Ranks ranks = testing::tcp_ranks(world_size);
  return testing::run_ranks(world_size, [&](int rank) {
    const ExchangeTexts exchange = [&, rank](const std::string& mine) {
      return store.exchange(rank, world_size, mine);
    };
    Trainee trainee(*ranks.processes[size_t(rank)], exchange, options(rank));
    body(trainee, rank);
    trainee.stream.synchronize();
  });
}

template <class Body>
std::vector<std::string> run_group(int world_size, const RunOptions& options, Body body) {
  const auto same = [&](int) { return options; };
  return run_group(world_size, same, body);
}

Words no_errors(int world_size) { return Words(size_t(world_size), ""); }

/// What the ranks have when `body` is done with them; no rank may fail.
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
std::vector<RunResult> trained_straight(int world_size, int64_t steps,
                                        const RunOptions& options = RunOptions()) {
  return results_of(world_size, options, [&](Trainee& trainee) { trainee.train(steps); });
}

/// Trains to `steps` and saves there.
void train_and_save(int world_size, const RunOptions& options, int64_t steps) {
  results_of(world_size, options, [&](Trainee& trainee) {
    trainee.train(steps);
    trainee.save();
  });
}

std::string checkpoint_name(int64_t steps) { return checkpoint_path("", steps).string(); }
std::string momentum_name(int64_t steps) {
  return optimizer_path(checkpoint_path("", steps)).string();
}

// --- A network of ten numbers, whose files are small ---------------------------------------------

/// Its network and momentum hold numbers that follow from `mark`.
struct SmallRun {
  explicit SmallRun(double mark = 0, Real momentum = Real(0.9))
      : optimizer(parameters, {.momentum = momentum}) {
    set(mark);
    state.settings = {{"momentum", double(momentum)}, {"seed", 1}};
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
    if (optimizer.velocity().defined()) {
      device.kernels().fill(device.stream, Real(-mark), optimizer.velocity());
    }
  }
  Trained trained() const { return {*network, parameters, optimizer}; }
  void save(const fs::path& directory) const { save_checkpoint(directory, trained(), state); }
  void save(const fs::path& directory, double mark) {
    set(mark);
    save(directory);
  }
  /// Whether it is as set(mark) left it. Gaps between parameters do not count.
  bool network_holds(double mark) const {
    return std::ranges::all_of(state_dict(*network), [&](const StateTensor& tensor) {
      return std::ranges::count(tensor.real, Real(mark)) == std::ssize(tensor.real);
    });
  }
  bool holds(double mark) const {
    if (!network_holds(mark) || !optimizer.velocity().defined()) return network_holds(mark);
    const auto momentum = flat_state_dict(parameters, optimizer.velocity(), "momentum.");
    return std::ranges::all_of(momentum, [&](const StateTensor& tensor) {
      return std::ranges::count(tensor.real, Real(-mark)) == std::ssize(tensor.real);
    });
  }

  testing::TestDevice device;
  std::unique_ptr<Module> network = make();
  FlatParameters parameters{*network, device.stream};
  Sgd optimizer;
  TrainingState state;
};

/// The mark of the newest checkpoint that can be read; -1 if there is none.
double newest_mark(const fs::path& directory) {
  const auto checkpoint = newest_checkpoint(directory, [](const std::string&) {});
  if (!checkpoint) return -1;
  SmallRun run;
  restore(*checkpoint, run.trained());
  const int64_t steps = TrainingState::from_json(checkpoint->training, "it").steps;
  return run.holds(double(steps)) ? double(steps) : std::nan("");
}

/// All files of a directory with their bytes.
std::map<std::string, std::string> contents_of(const TempDir& folder) {
  std::map<std::string, std::string> contents;
  for (const std::string& name : folder.names()) contents[name] = testing::read_file(folder / name);
  return contents;
}

// --- Training goes on ----------------------------------------------------------------------------

TEST_CASE("Two epochs, a checkpoint and two epochs are four epochs, to the bit",
          "[checkpoint][row106][row107]") {
  for (const int world_size : {1, 2}) {
    INFO(world_size << " ranks");
    const TempDir folder;
    train_and_save(world_size, RunOptions(folder.path()), 8);
    CHECK(folder.names() == Words{momentum_name(8), checkpoint_name(8)});
    const auto restored = results_of(world_size, RunOptions(folder.path()),
                                     [](Trainee& trainee) { trainee.resume(); });
    const RunResult saved = trained_straight(world_size, 8)[0];
    for (const RunResult& rank : restored) CHECK(rank == saved);
    const auto resumed = results_of(world_size, RunOptions(folder.path()), [](Trainee& trainee) {
      trainee.resume();
      trainee.train(16);
    });
    const auto straight = trained_straight(world_size, 16);
    CHECK(resumed == straight);
    CHECK(straight[0].tracked == std::vector<int64_t>{16, 16});
    CHECK(straight[size_t(world_size) - 1].weights == straight[0].weights);
  }
}

TEST_CASE("A run goes on in the middle of an epoch, at its end and at its beginning",
          "[checkpoint][row109]") {
  const auto straight = trained_straight(2, 9);
  for (const int64_t steps : {0, 3, 4, 6}) {
    INFO("resumed after " << steps << " steps");
    const TempDir folder;
    train_and_save(2, RunOptions(folder.path()), steps);
    CHECK(results_of(2, RunOptions(folder.path()), [](Trainee& trainee) {
            trainee.resume();
            trainee.train(9);
          }) == straight);
  }
}

TEST_CASE("Rank 0's tensors reach the other rank's kernels in order", "[checkpoint][tsan]") {
  const TempDir folder;
  train_and_save(2, RunOptions(folder.path()), 1);
  CHECK(results_of(2, RunOptions(folder.path()), [](Trainee& trainee) {
          trainee.resume();
          trainee.train(3);
        }) == trained_straight(2, 3));
}

TEST_CASE("Without momentum, random state or epoch the resumed run is another",
          "[checkpoint][row108]") {
  RunOptions run;
  run.options.lr_step = 0;  // so that the step number reaches nothing but dropout
  const auto straight = trained_straight(1, 10, run);
  const TempDir folder;
  run.checkpoints = RunOptions(folder.path()).checkpoints;
  train_and_save(1, run, 6);
  const auto resumed = [&](const std::function<void(Trainee&)>& forget) {
    return results_of(1, run, [&](Trainee& trainee) {
      trainee.resume();
      const int64_t left = 10 - trainee.state.steps;
      forget(trainee);
      trainee.train(trainee.state.steps + left);
    });
  };
  CHECK(resumed([](Trainee&) {}) == straight);
  CHECK(resumed([](Trainee& trainee) {
          trainee.stream.kernels().fill(trainee.stream, 0, trainee.optimizer.velocity());
        }) != straight);
  CHECK(resumed([](Trainee& trainee) { trainee.state.steps = 0; }) != straight);
  CHECK(resumed([](Trainee& trainee) { trainee.state.epoch = 0; }) != straight);
  CHECK(resumed([](Trainee& trainee) { trainee.state.step_in_epoch = 0; }) != straight);
}

TEST_CASE("A checkpoint holds what its state says", "[checkpoint][row106]") {
  const TempDir folder;
  train_and_save(2, RunOptions(folder.path()), 6);
  const Checkpoint checkpoint = read_checkpoint(folder / checkpoint_name(6));
  const TrainingState state = TrainingState::from_json(checkpoint.training, "it");
  CHECK(state.epoch == 1);
  CHECK(state.step_in_epoch == 2);
  CHECK(state.first_batch(1) == 2);
  CHECK(state.first_batch(2) == 0);
  CHECK(state.learning_rate == 0.05 * 0.7);
  CHECK(state.world_size == 2);
  CHECK(state.settings["batch_size"] == 6);
  CHECK(state.settings["momentum"] == 0.9);
  CHECK(state.settings["data_crc32"] == fmt::format("{:08x}", training_data().train.fingerprint()));
  CHECK_FALSE(state.settings.contains("epochs"));
  CHECK(checkpoint.network.size() == 18);
  CHECK(checkpoint.momentum.size() == 12);
  CHECK(std::ranges::count(checkpoint.momentum, "momentum.fc1.weight", &StateTensor::name) == 1);
}

TEST_CASE("Without momentum there is one file", "[checkpoint]") {
  const TempDir folder;
  SmallRun(3, 0).save(folder.path());
  CHECK(folder.names() == Words{checkpoint_name(3)});
  SmallRun run(0, 0);
  restore(read_checkpoint(folder / checkpoint_name(3)), run.trained());
  CHECK(run.holds(3));
  SmallRun other;
  CHECK_THAT(message_of<BadInput>(
                 [&] { restore(read_checkpoint(folder / checkpoint_name(3)), other.trained()); }),
             ContainsSubstring("missing momentum.fc.weight, missing momentum.fc.bias"));
  CHECK(other.holds(0));
}

// --- Names ---------------------------------------------------------------------------------------

/// Saves a file of weights whose names `rename` changed.
template <class Rename>
void save_renamed(const fs::path& path, Module& network, Rename rename) {
  std::vector<StateTensor> state = state_dict(network);
  for (size_t i = 0; i < state.size(); ++i) state[i].name = rename(state[i].name, i);
  save_weights(path, state);
}

TEST_CASE("Weights of other types, and files of torch.save(), are refused with the way out",
          "[checkpoint][row110]") {
  const TempDir folder;
  SmallRun run(5);
  const auto refusal = [&](const std::string& file) {
    return message_of<BadInput>([&] { load_weights(folder / file, *run.network); });
  };
  const std::vector<StateTensor> state = state_dict(*run.network);
  std::vector<TensorEntry> entries = file_entries(state);
  for (TensorEntry& entry : entries) {
    if (entry.dtype == DType::I64) continue;
    entry.dtype = DType::BF16;
    entry.bytes = entry.bytes.first(entry.bytes.size() / sizeof(Real) * 2);
  }
  save_safetensors(folder / "half", entries);
  CHECK_THAT(refusal("half"),
             ContainsSubstring("has dtype BF16, expected F32 or F64") &&
                 ContainsSubstring("; convert them in the program that saved them"));
  for (const std::string& begin :
       {std::string("PK\x03\x04 and more"), std::string("\x80\x02 and more")}) {
    testing::write_file(folder / "model.pt", begin);
    CHECK_THAT(refusal("model.pt"), ContainsSubstring("found a file of torch.save()") &&
                                        ContainsSubstring("safetensors.torch.save_file("));
  }
}

TEST_CASE("A file of many strange tensors is refused in a short line", "[checkpoint][row110]") {
  const TempDir folder;
  SmallRun run(5);
  std::vector<TensorEntry> entries;
  for (int i = 0; i < 2000; ++i)
    entries.push_back({fmt::format("odd\n{:04}", i), DType::F32, {0}, {}});
  entries.push_back({std::string(5000, 'x'), DType::F32, {0}, {}});
  save_safetensors(folder / "many", entries);
  const std::string text =
      message_of<BadInput>([&] { load_weights(folder / "many", *run.network); });
  CHECK_THAT(text, ContainsSubstring("unexpected odd?0000, ") && ContainsSubstring(", ... and "));
  CHECK(text.size() < 1500);
  CHECK(text.find('\n') == text.npos);
  save_safetensors(folder / "long", std::span(entries).last(1));
  CHECK_THAT(message_of<BadInput>([&] { load_weights(folder / "long", *run.network); }),
             ContainsSubstring("unexpected xxx") && ContainsSubstring("xxx...; use the --model"));
  CHECK(run.network_holds(5));
}

TEST_CASE("The names of a wrapped model lose their prefix if all of them have it",
          "[checkpoint][row110]") {
  const TempDir folder;
  SmallRun saved(5), loaded;
  const auto all = [](const std::string& name, size_t) { return "module." + name; };
  save_renamed(folder / "all", *saved.network, all);
  load_weights(folder / "all", *loaded.network);
  CHECK(loaded.network_holds(5));

  loaded.set(0);
  save_renamed(folder / "some", *saved.network,
               [](const std::string& name, size_t i) { return i == 0 ? "module." + name : name; });
  CHECK_THAT(message_of<BadInput>([&] { load_weights(folder / "some", *loaded.network); }),
             ContainsSubstring("missing fc.weight, unexpected module.fc.weight"));
  CHECK(loaded.holds(0));

  // A DDP run's file has the names of the bare network, and is loaded by it.
  saved.save(folder.path());
  load_weights(folder / checkpoint_name(5), *loaded.network);
  CHECK(loaded.network_holds(5));
}

// --- What does not fit ---------------------------------------------------------------------------

/// Writes the checkpoint of `run` anew with tensors that `change` changed.
void save_changed(const fs::path& path, const SmallRun& run,
                  const std::function<void(std::vector<TensorEntry>&)>& change) {
  const std::vector<StateTensor> state = state_dict(*run.network);
  std::vector<TensorEntry> entries = file_entries(state);
  change(entries);
  save_safetensors(path, entries, {{"lockstep.training", run.state.to_json()}}, Checksums::crc32);
}

TEST_CASE("Tensors that do not fit are all listed, and nothing is changed",
          "[checkpoint][row111]") {
  const TempDir folder;
  const SmallRun saved(5, 0);
  const std::vector<double> doubles(8, 7.0);
  const std::vector<float> floats(8, 7.0F);
  const auto other_precision = [&](std::vector<TensorEntry>& entries) {
    entries[0].dtype = testing::kDouble ? DType::F32 : DType::F64;
    entries[0].bytes =
        testing::kDouble ? std::as_bytes(std::span(floats)) : std::as_bytes(std::span(doubles));
  };
  save_changed(folder / "other", saved, [&](std::vector<TensorEntry>& entries) {
    entries[0].dtype = DType::I32;  // fc.weight
    entries[0].shape = {2, 4};
    entries[0].bytes = std::as_bytes(std::span(floats));
    entries[1].name = "fc.bais";
    entries.push_back({"more", DType::F16, {0}, {}});
  });
  const std::vector<int64_t> four_by_two{4, 2};
  save_changed(folder / "shape", saved,
               [&](std::vector<TensorEntry>& entries) { entries[0].shape = four_by_two; });
  save_changed(folder / "precision", saved, other_precision);

  SmallRun run(0, 0);
  const auto refusal = [&](const std::string& file) {
    const std::string loaded =
        message_of<BadInput>([&] { load_weights(folder / file, *run.network); });
    const std::string restored =
        message_of<BadInput>([&] { restore(read_checkpoint(folder / file), run.trained()); });
    CHECK(run.holds(0));
    return loaded + "\n" + restored;
  };
  for (const char* part : {"fc.weight has dtype I32, expected F32 or F64, missing fc.bias, "
                           "unexpected fc.bais, unexpected more; ",
                           testing::kDouble ? "dtype I32, expected F64, missing"
                                            : "dtype I32, expected F32, missing"}) {
    CHECK_THAT(refusal("other"), ContainsSubstring(part));
  }
  CHECK_THAT(refusal("shape"), ContainsSubstring("fc.weight has shape [4, 2], expected [2, 4]"));

  CHECK_THAT(
      message_of<BadInput>([&] { restore(read_checkpoint(folder / "precision"), run.trained()); }),
      ContainsSubstring(testing::kDouble ? "fc.weight has dtype F32, expected F64"
                                         : "fc.weight has dtype F64, expected F32"));
  CHECK(run.holds(0));
  load_weights(folder / "precision", *run.network);  // converts
  CHECK(run.parameters.parameters()[0]->value.to_host() == std::vector<Real>(8, 7));
}

TEST_CASE("A run with other settings is told the first difference", "[checkpoint]") {
  const TempDir folder;
  train_and_save(2, RunOptions(folder.path()), 2);
  const std::string path = folder / checkpoint_name(2);
  const auto refusal = [&](const std::function<void(Options&)>& change) {
    RunOptions run(folder.path());
    change(run.options);
    std::vector<RunResult> before(2), after(2);
    const Words errors = run_group(2, run, [&](Trainee& trainee, int rank) {
      before[size_t(rank)] = trainee.result();
      const std::string error = message_of<BadInput>([&] { trainee.resume(path); });
      after[size_t(rank)] = trainee.result();
      fail<BadInput>("{}", error);
    });
    CHECK(errors[0] == errors[1]);
    CHECK(before == after);
    return errors[0];
  };
  CHECK(refusal([](Options& o) { o.batch_size = 5; }) ==
        path +
            " was saved with batch_size 6, this run has 5; resume with the options and data that "
            "it was saved with, or begin anew from its weights with --load");
  const auto differs = [&](const std::function<void(Options&)>& change, const std::string& text) {
    CHECK_THAT(refusal(change), ContainsSubstring(text));
  };
  differs([](Options& o) { o.model = "seed"; }, "saved with model \"seed-bn\", this run has");
  differs([](Options& o) { o.order = "file"; }, "order \"sampler\", this run has \"file\"");
  differs([](Options& o) { o.momentum = 0; }, "momentum 0.9, this run has 0");
  differs([](Options& o) { o.seed = 2; }, "seed 1, this run has 2");
  differs([](Options& o) { o.dropout = false; }, "dropout true, this run has false");

  const json settings = {{"a", 1}, {"b", "x"}};
  CHECK_NOTHROW(require_settings(settings, settings, "F"));
  const json fewer = {{"a", 1}};
  CHECK_THROWS_WITH(require_settings(settings, fewer, "F"), ContainsSubstring("b \"x\""));
  CHECK_THROWS_WITH(require_settings(fewer, settings, "F"),
                    ContainsSubstring("b null, this run has \"x\""));
}

TEST_CASE("Another world size is refused, or allowed with a statement", "[checkpoint][row119]") {
  const TempDir folder;
  RunOptions run(folder.path());
  run.options.model = "seed";  // batch normalisation sees a rank's part
  train_and_save(4, run, 3);
  const auto straight = trained_straight(4, 6, run);

  const Words errors = run_group(2, run, [](Trainee& trainee, int) { trainee.resume(); });
  CHECK_THAT(errors[0], ContainsSubstring("was saved by 4 ranks, this run has 2; start as many, or "
                                          "allow the change with --allow-world-size-change"));
  CHECK(errors[1] == errors[0]);

  std::string warning;
  run.checkpoints.allow_world_size = true;
  run.checkpoints.warn = [&](const std::string& line) { warning += line; };  // rank 0 alone
  run.options.threads_per_device = 2;                                        // may differ, too
  const auto resumed = results_of(2, run, [](Trainee& trainee) {
    trainee.resume();
    trainee.train(6);
    trainee.save();
  });
  CHECK_THAT(warning, ContainsSubstring("The same as before: parameters") &&
                          ContainsSubstring("dropout, which samples each global batch has. Not"));
  CHECK(resumed[0].weights == resumed[1].weights);
  CHECK(relative_error(resumed[0].weights, straight[0].weights) <
        (testing::kDouble ? 1e-12 : 1e-4));
  // From then on it is a run of two ranks.
  const TrainingState state = TrainingState::from_json(
      read_checkpoint(folder / checkpoint_name(6)).training, "the checkpoint");
  CHECK(state.world_size == 2);
  CHECK(state.settings["threads_per_device"] == 2);
}

TEST_CASE("What another number of ranks changes is told by the run's settings", "[checkpoint]") {
  const TempDir folder;
  RunOptions run(folder.path());
  run.checkpoints.allow_world_size = true;
  Words warnings;
  run.checkpoints.warn = [&](const std::string& line) { warnings.push_back(line); };
  const std::vector<json> changes{
      {{"sync_bn", true}}, {{"pad", true}}, {{"sync_bn", false}}, {{"accumulate", 2}}};
  const Words errors = run_group(1, run, [&](Trainee& trainee, int) {
    const json settings = trainee.state.settings;
    for (const json& change : changes) {
      trainee.state.settings = settings;
      trainee.state.settings.update(change);
      ++trainee.state.steps;
      trainee.state.world_size = 3;  // as if three had saved it
      trainee.save();
      trainee.state.world_size = 1;
      trainee.resume();
    }
  });
  CHECK(errors == no_errors(1));
  const std::string always =
      "Not the same: the order of sums, so that weights will differ in their last bits";
  const Words expected{
      always, always + ", which samples each global batch has",
      always + ", the part of a batch that is normalised together",
      always + ", the samples of a micro-batch, which batch normalisation sees together"};
  REQUIRE(warnings.size() == expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK_THAT(warnings[i],
               ContainsSubstring("was saved by 3 ranks, this run has 1. The same as before: "));
    CHECK_THAT(warnings[i], EndsWith(expected[i]));
  }
}

TEST_CASE("A checkpoint of a newer format version is refused with both versions",
          "[checkpoint][row121]") {
  const TempDir folder;
  SmallRun run(7, 0);
  json newer = json::parse(run.state.to_json());
  newer["format_version"] = 2;
  newer["something"] = {{"new", 1}};
  save_safetensors(folder / checkpoint_name(7), file_entries(state_dict(*run.network)),
                   {{"lockstep.training", newer.dump()}}, Checksums::crc32);
  const Words errors =
      run_group(2, RunOptions(folder.path()), [](Trainee& trainee, int) { trainee.resume(); });
  CHECK_THAT(errors[0], ContainsSubstring("format version 2, expected at most 1"));
  CHECK(errors[1] == errors[0]);
}

TEST_CASE("A directory that cannot be written to is told before the first step, by all ranks",
          "[checkpoint][row116]") {
  const TempDir folder;
  std::ofstream(folder / "file") << "x";
  const Words errors = run_group(2, RunOptions(folder / "file" / "run"),
                                 [](Trainee& trainee, int) { trainee.resume(""); });
  CHECK_THAT(errors[0], ContainsSubstring("file/run: Not a directory; give a directory that"));
  CHECK(errors[1] == errors[0]);
  const TempDir closed;
  ::chmod(closed.path().c_str(), 0555);
  const Words closed_errors =
      run_group(2, RunOptions(closed.path()), [](Trainee& trainee, int rank) {
        if (rank == 0) testing::drop_capabilities();  // this thread's
        trainee.resume("");
      });
  ::chmod(closed.path().c_str(), 0755);
  CHECK_THAT(closed_errors[0], ContainsSubstring("Permission denied; give one that you may write"));
  CHECK(closed_errors[1] == closed_errors[0]);
  // A resume that is refused makes none.
  run_group(2, RunOptions(folder / "new"),
            [](Trainee& trainee, int) { trainee.resume("no-such-checkpoint"); });
  CHECK_FALSE(std::filesystem::exists(folder / "new"));
}

// --- Damage --------------------------------------------------------------------------------------

/// Both files of a small checkpoint by name.
std::map<std::string, std::string> small_files(const TempDir& folder) {
  SmallRun(4).save(folder.path());
  return contents_of(folder);
}

/// What reading it says. A crash or another exception than BadInput ends the test.
std::string refusal_of(const fs::path& path) {
  try {
    read_checkpoint(path);
  } catch (const BadInput& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("A checkpoint cut off at any byte of either file is refused", "[checkpoint][row113]") {
  const TempDir folder;
  const auto files = small_files(folder);
  REQUIRE(files.size() == 2);
  for (const auto& [name, whole] : files) {
    for (size_t size = whole.size(); size-- > 0;) {
      fs::resize_file(folder / name, size);
      if (refusal_of(folder / checkpoint_name(4)).find("truncated") == std::string::npos) {
        FAIL(name << " cut to " << size << " of " << whole.size() << " bytes");
      }
    }
    testing::write_file(folder / name, whole);
  }
  CHECK(refusal_of(folder / checkpoint_name(4)) == "");
}

// Sanitizers take their time, and are here for what the reader does with any bytes at all.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kEachBit = 11;
#else
constexpr size_t kEachBit = 1;
#endif

TEST_CASE("One flipped bit anywhere in either file is found", "[checkpoint][row114]") {
  const TempDir folder;
  for (const auto& [name, whole] : small_files(folder)) {
    std::fstream file(folder / name, std::ios::in | std::ios::out | std::ios::binary);
    const auto overwrite = [&](size_t byte, int value) {
      file.seekp(static_cast<std::streamoff>(byte)).put(static_cast<char>(value)).flush();
    };
    for (size_t bit = 0; bit < 8 * whole.size(); bit += kEachBit) {
      overwrite(bit / 8, whole[bit / 8] ^ (1 << bit % 8));
      const std::string refusal = refusal_of(folder / checkpoint_name(4));
      if (!refusal.starts_with((folder / name).string()) || refusal.size() > 700) {
        FAIL("bit " << bit % 8 << " of byte " << bit / 8 << " of " << name << ": " << refusal);
      }
      overwrite(bit / 8, whole[bit / 8]);
    }
  }
  CHECK(refusal_of(folder / checkpoint_name(4)) == "");
}

TEST_CASE("Files that were not saved together are refused", "[checkpoint][row115]") {
  const TempDir folder, other;
  SmallRun run;
  run.save(folder.path(), 4);
  run.set(5);
  run.state.steps = 4;
  run.save(other.path());
  fs::copy_file(other / momentum_name(4), folder / momentum_name(4),
                fs::copy_options::overwrite_existing);
  CHECK_THAT(refusal_of(folder / checkpoint_name(4)),
             ContainsSubstring("the two files were not saved together"));
  fs::remove(folder / momentum_name(4));
  CHECK_THAT(refusal_of(folder / checkpoint_name(4)),
             ContainsSubstring(momentum_name(4) + ": No such file"));
}

TEST_CASE("Weights alone are no checkpoint", "[checkpoint]") {
  const TempDir folder;
  const SmallRun run(4);
  save_weights(folder / "weights", *run.network);
  CHECK_THAT(refusal_of(folder / "weights"),
             ContainsSubstring("found weights without a training state, expected a checkpoint"));
  save_safetensors(folder / "unsafe", file_entries(state_dict(*run.network)),
                   {{"lockstep.training", run.state.to_json()}});
  CHECK_THAT(refusal_of(folder / "unsafe"), ContainsSubstring("found weights without checksums"));
}

TEST_CASE("Where the newest is damaged, the one before it is taken and the damage named",
          "[checkpoint][row115]") {
  const TempDir folder;
  SmallRun run;
  run.save(folder.path(), 4);
  run.save(folder.path(), 8);
  run.save(folder.path(), 12);
  fs::resize_file(folder / checkpoint_name(12), 100);
  fs::remove(folder / momentum_name(8));
  Words warnings;
  const auto checkpoint =
      newest_checkpoint(folder.path(), [&](const std::string& line) { warnings.push_back(line); });
  REQUIRE(checkpoint);
  CHECK(checkpoint->path == folder / checkpoint_name(4));
  REQUIRE(warnings.size() == 2);
  CHECK_THAT(warnings[0], ContainsSubstring(checkpoint_name(12)) && ContainsSubstring("truncated"));
  CHECK_THAT(warnings[1], ContainsSubstring(momentum_name(8)));

  // What comes to the same step again takes the damaged one's place; until then it does not count
  // among those that are kept, and stays.
  run.save(folder.path(), 6);
  run.save(folder.path(), 14);
  remove_old_checkpoints(folder.path(), 14, 3, {8, 12});
  CHECK(find_checkpoints(folder.path()).size() == 5);
  fs::remove(folder / checkpoint_name(14));
  remove_old_checkpoints(folder.path(), 6, 2);
  CHECK(newest_mark(folder.path()) == 6);
  CHECK(find_checkpoints(folder.path()).size() == 4);
  run.save(folder.path(), 12);
  CHECK(newest_mark(folder.path()) == 12);

  for (const FoundCheckpoint& found : find_checkpoints(folder.path())) {
    fs::resize_file(found.path, 9);
  }
  CHECK_THAT(
      message_of<BadInput>([&] { newest_mark(folder.path()); }),
      ContainsSubstring("found 4 checkpoints, none of which can be read as such; give another"));
}

// --- Saving --------------------------------------------------------------------------------------

TEST_CASE("Momentum comes to the disk before the network, and goes after it",
          "[checkpoint][row117]") {
  const TempDir folder;
  std::set<std::thread::id> threads;
  Words log;
  bool rank1_found_it = false;
  const Words errors = run_group(2, RunOptions(folder.path()), [&](Trainee& trainee, int rank) {
    for (int64_t steps = 1; steps <= 2; ++steps) {
      trainee.train(steps);
      trainee.save();
    }
    trainee.train(3);
    std::optional<testing::SystemCalls> calls;
    if (rank == 0) calls.emplace();
    trainee.save();
    if (rank == 1) rank1_found_it = fs::exists(folder / checkpoint_name(3));
    if (rank == 0) threads = calls->threads, log = calls->log;
  });
  CHECK(errors == no_errors(2));
  CHECK(rank1_found_it);
  CHECK(threads.size() == 1);
  CHECK(folder.names() ==
        Words{momentum_name(2), checkpoint_name(2), momentum_name(3), checkpoint_name(3)});
  for (std::string& call : log) call = call.substr(0, call.find(" of"));  // sizes
  const Words save{"fsync file", "rename", "fsync directory"}, remove{"unlink", "fsync directory"};
  CHECK(log == save + save + remove + remove);
  const auto written = [&](const std::string& name) { return fs::last_write_time(folder / name); };
  CHECK(written(momentum_name(3)) <= written(checkpoint_name(3)));
}

TEST_CASE("A save that fails at any of its steps leaves a directory that can be resumed from",
          "[checkpoint][row115][row116]") {
  for (int64_t n = 0; n < 10; ++n) {
    INFO("system call " << n);
    const TempDir folder;
    SmallRun run;
    run.save(folder.path(), 1);
    run.save(folder.path(), 2);
    std::string error;
    run.set(3);
    {
      testing::SystemCalls calls;
      calls.failing_number = n;
      error = message_of<EnvironmentError>([&] {
        run.save(folder.path());
        remove_old_checkpoints(folder.path(), 3, 2);
      });
    }
    CHECK_THAT(error, ContainsSubstring("Input/output error"));
    CHECK(newest_mark(folder.path()) == (n <= 4 ? 2 : 3));  // 4: the rename of the network's file
    CHECK(run.holds(3));
    for (const std::string& name : folder.names()) CHECK_FALSE(name.ends_with(".tmp"));
    for (const FoundCheckpoint& found : find_checkpoints(folder.path())) {
      CHECK_NOTHROW(read_checkpoint(found.path));
    }
    run.save(folder.path(), 3);
    remove_old_checkpoints(folder.path(), 3, 2);
    CHECK(folder.names() ==
          Words{momentum_name(2), checkpoint_name(2), momentum_name(3), checkpoint_name(3)});
  }
}

TEST_CASE("What a killed save left is removed by the next", "[checkpoint][row115]") {
  const TempDir folder;
  SmallRun run;
  run.save(folder.path(), 1);
  fs::copy_file(folder / momentum_name(1), folder / momentum_name(2));
  testing::write_file(folder / ("." + checkpoint_name(2) + ".77-0.tmp"), "half");
  testing::write_file(folder / "notes.txt", "mine");
  testing::write_file(folder / ".other.tmp", "mine");
  run.save(folder.path(), 3);
  CHECK(folder.names() == Words{".other.tmp", "notes.txt", momentum_name(1), checkpoint_name(1),
                                momentum_name(3), checkpoint_name(3)});
}

/// Two ranks of which rank 0 cannot save in these circumstances.
void check_failing_save(const RunOptions& run, const TempDir& folder, const std::string& text,
                        const std::function<void(Trainee&, int rank)>& save) {
  const auto straight = trained_straight(2, 5);
  std::vector<RunResult> results(2);
  std::map<std::string, std::string> before, after;
  std::vector<std::string> refusals(2);
  const Words errors = run_group(2, run, [&](Trainee& trainee, int rank) {
    trainee.train(2);
    trainee.save();
    trainee.train(3);
    if (rank == 0) before = contents_of(folder);
    refusals[size_t(rank)] = message_of<EnvironmentError>([&] { save(trainee, rank); });
    if (rank == 0) after = contents_of(folder);
    trainee.train(4);
    trainee.save();
    trainee.train(5);
    results[size_t(rank)] = trainee.result();
  });
  CHECK(errors == no_errors(2));
  CHECK_THAT(refusals[0], ContainsSubstring(text) && ContainsSubstring(folder.path().string()));
  CHECK(refusals[1] == refusals[0]);
  CHECK(before.size() == 2);
  CHECK((after == before));
  CHECK(folder.names() ==
        Words{momentum_name(2), checkpoint_name(2), momentum_name(4), checkpoint_name(4)});
  CHECK(results == straight);
}

TEST_CASE("A full disk is told to all ranks, and training goes on", "[checkpoint][row116]") {
  for (const bool room_for_momentum : {false, true}) {
    const TempDir folder;
    check_failing_save(
        RunOptions(folder.path()), folder, "File too large; free some space",
        [&](Trainee& trainee, int rank) {
          if (rank != 0) return trainee.save();
          const auto momentum = fs::file_size(folder / momentum_name(2));
          const testing::FullDisk full(room_for_momentum ? momentum + 64 : momentum / 2);
          trainee.save();
        });
  }
}

TEST_CASE("A directory without write permission is told to all ranks", "[checkpoint][row116]") {
  const TempDir folder;
  check_failing_save(RunOptions(folder.path()), folder,
                     "Permission denied; give one that you may write to",
                     [&](Trainee& trainee, int rank) {
                       if (rank != 0) return trainee.save();
                       ::chmod(folder.path().c_str(), 0555);
                       std::string error;
                       std::thread user([&] {  // capabilities belong to a thread
                         testing::drop_capabilities();
                         error = message_of<EnvironmentError>([&] { trainee.save(); });
                       });
                       user.join();
                       ::chmod(folder.path().c_str(), 0755);
                       fail<EnvironmentError>("{}", error);
                     });
}

TEST_CASE("A run that left the finite numbers is not saved", "[checkpoint]") {
  const TempDir folder;
  Words messages(2);
  const Words errors = run_group(2, RunOptions(folder.path()), [&](Trainee& trainee, int rank) {
    trainee.train(2);
    trainee.save();
    if (rank == 1) {  // it reaches rank 0 through the sums
      const std::vector<Real> nothing(250, std::numeric_limits<Real>::quiet_NaN());
      trainee.parameters.parameters()[0]->value.copy_from_host(nothing);
    }
    trainee.train(4);
    messages[size_t(rank)] = message_of<NonFinite>([&] { trainee.save(); });
  });
  CHECK(errors == no_errors(2));
  CHECK_THAT(messages[0], ContainsSubstring("step 2: the loss or a gradient is not finite"));
  CHECK(messages[1] == messages[0]);
  CHECK(folder.names() == Words{momentum_name(2), checkpoint_name(2)});
}

// --- Which checkpoint ----------------------------------------------------------------------------

TEST_CASE("Rank 0 decides and reads, whatever the others see", "[checkpoint][row118]") {
  const TempDir folder;
  train_and_save(2, RunOptions(folder.path()), 3);
  const auto straight = trained_straight(2, 5);
  for (const char* source : {"auto", "file"}) {
    std::vector<RunResult> results(2);
    const auto options = [&](int rank) {
      return RunOptions(rank == 0 ? folder.path() : fs::path("/proc/nowhere"));
    };
    const Words errors = run_group(2, options, [&](Trainee& trainee, int rank) {
      const std::string file =
          rank == 0 ? (folder / checkpoint_name(3)).string() : "/proc/nowhere/file";
      trainee.resume(source == std::string("auto") ? "auto" : file);
      trainee.train(5);
      results[size_t(rank)] = trainee.result();
    });
    CHECK(errors == no_errors(2));
    CHECK(results == straight);
  }
  const Words errors = run_group(2, RunOptions(folder.path()), [&](Trainee& trainee, int rank) {
    trainee.resume(rank == 0 ? folder / "missing" : folder / checkpoint_name(3));
  });
  CHECK_THAT(errors[0], ContainsSubstring("cannot open " + (folder / "missing").string()));
  CHECK(errors[1] == errors[0]);
}

TEST_CASE("Where there is no checkpoint a run begins anew and says so", "[checkpoint]") {
  const TempDir folder;
  for (const fs::path& directory : {folder.path(), folder / "not/yet"}) {
    RunOptions run(directory);
    Words said;
    run.checkpoints.say = [&](const std::string& line) { said.push_back(line); };
    const auto results = results_of(1, run, [](Trainee& trainee) {
      trainee.resume();
      trainee.train(1);
      trainee.save();
    });
    CHECK(results == trained_straight(1, 1));
    CHECK(said.at(0) == "No checkpoint in " + directory.string() + ": training begins anew");
    CHECK(said.size() == 2);
    // With the momentum's file, and the time it took.
    const fs::path saved = directory / checkpoint_name(1);
    CHECK_THAT(said.back(), Catch::Matchers::StartsWith(fmt::format(
                                "Saved {}: {} bytes in ", saved.string(),
                                fs::file_size(saved) + fs::file_size(optimizer_path(saved)))));
    CHECK(newest_checkpoint(directory, [](const std::string&) {}).has_value());
  }
  testing::write_file(folder / "file", "");
  CHECK_THROWS_AS(find_checkpoints(folder / "file"), EnvironmentError);
}

TEST_CASE("Counters that contradict each other are refused, though the checksums are right",
          "[checkpoint]") {
  const TempDir folder;
  RunOptions run(folder / "run");
  run.checkpoints.steps_per_epoch = kStepsPerEpoch;
  const auto saved_with = [&](int64_t epoch, int64_t step_in_epoch, int64_t steps) {
    fs::remove_all(folder / "run");
    return run_group(1, run, [&](Trainee& trainee, int) {
      trainee.state.epoch = epoch;
      trainee.state.step_in_epoch = step_in_epoch;
      trainee.state.steps = steps;
      trainee.save();
      trainee.resume();
    })[0];
  };
  CHECK(saved_with(0, 0, 0).empty());
  CHECK(saved_with(0, 4, 4).empty());  // where only the evaluation is missing
  CHECK(saved_with(1, 0, 4).empty());
  CHECK(saved_with(2, 3, 11).empty());
  CHECK_THAT(saved_with(0, 0, 20),
             ContainsSubstring("found step 0 of epoch 0 and 20 steps in all, "
                               "which contradict each other: an epoch has 4"));
  CHECK_THAT(saved_with(1, 0, 3), ContainsSubstring("contradict"));
  CHECK_THAT(saved_with(0, 5, 5), ContainsSubstring("contradict"));
  CHECK_THAT(saved_with(1, 4, 7), ContainsSubstring("contradict"));
}

TEST_CASE("A run does not begin in front of another run's checkpoints", "[checkpoint]") {
  const TempDir folder;
  for (const int64_t steps : {2, 4}) {
    RunOptions run(folder.path());
    train_and_save(1, run, steps);
  }
  for (const std::string& source : {std::string(), (folder / checkpoint_name(2)).string()}) {
    const Words errors = run_group(2, RunOptions(folder.path()),
                                   [&](Trainee& trainee, int) { trainee.resume(source); });
    CHECK_THAT(errors[0], ContainsSubstring(checkpoint_name(4) + " is later"));
    CHECK(errors[1] == errors[0]);
  }
  CHECK(results_of(1, RunOptions(folder.path()), [&](Trainee& trainee) {
          trainee.resume(folder / checkpoint_name(4));
          trainee.train(6);
        }) == trained_straight(1, 6));
}

TEST_CASE("A run that goes on from elsewhere does not remove another run's checkpoints",
          "[checkpoint]") {
  const TempDir mine, other;
  RunOptions there(other.path());
  train_and_save(1, there, 2);
  RunOptions here(mine.path());
  train_and_save(1, here, 4);
  const Words errors = run_group(2, RunOptions(other.path()), [&](Trainee& trainee, int) {
    trainee.resume(mine / checkpoint_name(4));
  });
  CHECK_THAT(errors[0],
             ContainsSubstring("holds checkpoints, but " + (mine / checkpoint_name(4)).string()) &&
                 ContainsSubstring("give an empty directory"));
  CHECK(errors[1] == errors[0]);
}

TEST_CASE("After a fall-back the checkpoint that was gone on from is not removed", "[checkpoint]") {
  const TempDir folder;
  for (const int64_t steps : {2, 4}) {
    RunOptions run(folder.path());
    train_and_save(1, run, steps);
  }
  fs::resize_file(folder / checkpoint_name(4), 100);
  RunOptions run(folder.path());
  run.checkpoints.warn = [](const std::string&) {};
  results_of(1, run, [](Trainee& trainee) {
    trainee.resume("auto");
    trainee.train(5);  // past the damaged one, which would count as the second newest
    trainee.save();
  });
  for (const int64_t steps : {2, 5})
    CHECK_NOTHROW(read_checkpoint(folder / checkpoint_name(steps)));
}

TEST_CASE("A damaged checkpoint that is saved again counts like any other", "[checkpoint]") {
  const TempDir folder;
  for (const int64_t steps : {2, 4}) train_and_save(1, RunOptions(folder.path()), steps);
  fs::resize_file(folder / checkpoint_name(4), 100);
  results_of(1, RunOptions(folder.path()), [](Trainee& trainee) {
    trainee.resume();
    for (const int64_t steps : {4, 5}) {
      trainee.train(steps);
      trainee.save();
    }
  });
  // It is the newest but one: 2 need not stay any more.
  CHECK(folder.names() ==
        Words{momentum_name(4), checkpoint_name(4), momentum_name(5), checkpoint_name(5)});
}

TEST_CASE("A checkpoint is saved although an older one cannot be removed", "[checkpoint]") {
  const TempDir folder;
  fs::create_directories(folder.path() / checkpoint_name(1) / "not empty");
  RunOptions run(folder.path());
  Words warnings;
  run.checkpoints.warn = [&](const std::string& line) { warnings.push_back(line); };
  results_of(1, run, [](Trainee& trainee) {
    for (const int64_t steps : {2, 3}) {
      trainee.train(steps);
      trainee.save();
    }
  });
  REQUIRE(warnings.size() == 1);
  CHECK_THAT(warnings[0], ContainsSubstring("step 3 is saved, but an older one stays: "));
  CHECK(newest_checkpoint(folder.path(), [](const std::string&) {})->path ==
        folder / checkpoint_name(3));
}

TEST_CASE("Nothing that is not finite is saved, and it is named", "[checkpoint][row17]") {
  const TempDir folder;
  SmallRun run(2);
  run.save(folder.path());
  run.set(3);
  run.parameters.parameters()[1]->value.copy_from_host({1, std::numeric_limits<Real>::infinity()});
  CHECK_THAT(message_of<NonFinite>([&] { run.save(folder.path()); }),
             ContainsSubstring("after 3 steps fc.bias holds inf"));
  run.set(3);
  run.device.kernels().fill(run.device.stream, std::numeric_limits<Real>::quiet_NaN(),
                            run.optimizer.velocity());
  CHECK_THAT(message_of<NonFinite>([&] { run.save(folder.path()); }),
             ContainsSubstring("momentum.fc.weight holds nan"));
  CHECK(folder.names() == Words{momentum_name(2), checkpoint_name(2)});
}

TEST_CASE("Another order of sums is told, and allowed", "[checkpoint]") {
  const json gloo = {{"lr", 1}, {"backend", "gloo"}, {"threads_per_device", 1}};
  json tcp = gloo;
  tcp["backend"] = "tcp";
  CHECK_NOTHROW(require_settings(gloo, tcp, "F"));
  CHECK(other_order_of_sums(gloo, tcp) == "backend \"tcp\" instead of \"gloo\"");
  CHECK(other_order_of_sums(gloo, gloo).empty());
}

TEST_CASE("The newest checkpoints are kept, at least two", "[checkpoint]") {
  const TempDir folder;
  SmallRun run;
  for (const int64_t steps : {9, 10, 100, 1'000'000'000}) run.save(folder.path(), double(steps));
  testing::write_file(folder / "step-7.safetensors", "not a name of ours");
  remove_old_checkpoints(folder.path(), 1'000'000'000, 3);
  std::vector<int64_t> left;
  for (const FoundCheckpoint& found : find_checkpoints(folder.path())) left.push_back(found.steps);
  CHECK(left == std::vector<int64_t>{1'000'000'000, 100, 10});
  CHECK(folder.names().size() == 7);
  RunOptions one(folder.path());
  one.checkpoints.keep = 1;
  CHECK_THAT(run_group(1, one, [](Trainee&, int) {})[0],
             ContainsSubstring("--keep: 1 checkpoints, expected 2 or more"));
}

// --- The training state --------------------------------------------------------------------------

TrainingState some_state() {
  TrainingState state;
  state.epoch = 3;
  state.step_in_epoch = 17;
  state.steps = 2831;
  state.learning_rate = 0.1 / 3;
  state.best_accuracy = 0.8123;
  state.world_size = 2;
  state.settings = {{"model", "seed-bn"}, {"lr", 0.1}, {"dropout", true}, {"seed", 4294967295}};
  return state;
}

TEST_CASE("A training state survives its text", "[checkpoint]") {
  const TrainingState state = some_state();
  CHECK(TrainingState::from_json(state.to_json(), "it") == state);
  CHECK(state.to_json().find('\n') == std::string::npos);
}

TEST_CASE("A training state that is not exactly one is refused", "[checkpoint][row112]") {
  const auto refuses = [](const std::function<void(json&)>& change, const std::string& expected) {
    json fields = json::parse(some_state().to_json());
    change(fields);
    const std::string text = fields.dump();
    CHECK_THAT(message_of<BadInput>([&] { TrainingState::from_json(text, "file"); }),
               ContainsSubstring("file: ") && ContainsSubstring(expected));
  };
  const json fields = json::parse(some_state().to_json());
  for (const auto& [name, value] : fields.items()) {
    const std::string key = name;
    refuses([&](json& f) { f.erase(key); }, "no " + key + ", expected one");
    for (const json& wrong : {json("7"), json(), json::array({1}), json(true)}) {
      refuses([&](json& f) { f[key] = wrong; }, "expected");
    }
  }
  refuses([](json& f) { f["epoch"] = -1; }, "epoch is -1, expected a whole number");
  refuses([](json& f) { f["epoch"] = 1.5; }, "epoch is 1.5, expected a whole number");
  refuses([](json& f) { f["steps"] = 1ULL << 63; }, "steps is 9223372036854775808");
  refuses([](json& f) { f["world_size"] = 0; }, "world_size is 0");
  refuses([](json& f) { f["learning_rate"] = -1; },
          "learning_rate is -1, expected a number from 0");
  refuses([](json& f) { f["best_accuracy"] = 7; }, "best_accuracy is 7, expected at most 1");
  refuses([](json& f) { f["format_version"] = 0; }, "format version 0, expected 1");
  refuses([](json& f) { f["more"] = 1; }, "found {\"more\":1}, which format version 1");
  refuses([](json& f) { f["settings"]["x"] = json::array(); }, "nested values");
  for (const char* text : {"", "{", "[]", "7", "[[[[", "\xFF", "{\"epoch\":1}"}) {
    CHECK_THROWS_AS(TrainingState::from_json(text, "file"), BadInput);
  }
}

TEST_CASE("A training state damaged at random is read or refused in one line",
          "[checkpoint][row112]") {
  const std::string whole = testing::io::file_of(some_state().to_json());
  const unsigned mutations = testing::full_campaign() ? 100'000 : 2000;
  int accepted = 0;
  for (unsigned seed = 0; seed < mutations; ++seed) {
    const std::string file = testing::io::Mutator(seed).mutate(whole);
    try {
      accepted +=
          testing::check_training_state(file.substr(std::min<size_t>(8, file.size()))).empty();
    } catch (const std::exception& error) {  // anything but BadInput
      FAIL("seed " << seed << ": " << error.what());
    }
  }
  CHECK(accepted > 100);  // values may change
}

}  // namespace
}  // namespace lockstep
