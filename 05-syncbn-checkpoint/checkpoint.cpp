#include "05-syncbn-checkpoint/checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "common/core/error.h"
#include "common/io/file.h"
#include "common/io/safetensors.h"
#include "common/training/weights_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kOptimizerKey = "lockstep.optimizer";

/// What the names of an optimizer's state begin with.
std::string prefix_of(const std::string& state) { return state + "."; }

}  // namespace

// --- What every checkpoint is checked for --------------------------------------------------------

namespace {

/// The names of an optimizer's states, in words.
std::string listed(const std::set<std::string>& states) {
  return states.empty() ? "no state" : fmt::format("{}", fmt::join(states, " and "));
}

}  // namespace

void require_good_steps(const Optimizer& optimizer, const fs::path& directory) {
  const Health health = optimizer.health().to_host().at(0);
  if (health.failed_step < 0) return;
  fail<NonFinite>(
      "step {}: the loss or a gradient is not finite; nothing was saved after it, the checkpoints "
      "in {} are good",
      health.failed_step, directory.string());
}

void require_finite(const std::vector<StateTensor>& state, const TrainingState& training) {
  for (const StateTensor& tensor : state) {
    const auto odd = std::ranges::find_if(tensor.real, [](Real x) { return !std::isfinite(x); });
    if (odd == tensor.real.end()) continue;
    fail<NonFinite>(
        "after {} steps {} holds {}, which is not finite; nothing was saved; what was saved "
        "before is good: go on from it with a lower --lr, given to --load",
        training.steps, tensor.name, *odd);
  }
}

std::vector<int64_t> steps_of(const Optimizer& optimizer,
                              const std::map<std::string, double>& saved,
                              const TrainingState& training) {
  std::vector<int64_t> steps(optimizer.steps().size(), training.steps);
  if (saved.empty()) return steps;
  require_equal(saved.size(), steps.size(), "the optimizer that was saved: parameters with a step");
  for (size_t i = 0; i < steps.size(); ++i) {
    const std::string& name = optimizer.parameters().at(i)->name;
    const auto found = saved.find(name);
    require(found != saved.end(), "the optimizer that was saved: no {}.{}, expected one", kStep,
            name);
    const double step = found->second;
    require(step >= 0 && step <= double(training.steps) && step == std::floor(step),
            "{}.{}: {}, expected a whole number from 0 to {}, the steps of training", kStep, name,
            step, training.steps);
    steps[i] = int64_t(step);
  }
  return steps;
}

void require_same_states(const fs::path& path, const std::set<std::string>& saved,
                         const Optimizer& optimizer) {
  std::set<std::string> own;
  for (const OptimizerState& state : optimizer.state()) own.insert(state.name);
  require(saved == own,
          "{}: the optimizer that was saved has {}, this run's has {}; give it the same "
          "--optimizer and --momentum",
          path.string(), listed(saved), listed(own));
}

// --- Saving --------------------------------------------------------------------------------------

namespace {

/// The optimizer's state, "momentum.conv1.weight" and so on; empty if there is none.
std::vector<StateTensor> optimizer_state(const Trained& trained) {
  std::vector<StateTensor> all;
  for (const OptimizerState& state : trained.optimizer.state()) {
    std::ranges::move(
        flat_state_dict(trained.parameters, state.ranges.at(0), prefix_of(state.name)),
        std::back_inserter(all));
  }
  const std::vector<int64_t> steps = trained.optimizer.steps();
  for (size_t i = 0; i < steps.size(); ++i) {
    all.push_back({.name = prefix_of(kStep) + trained.optimizer.parameters()[i]->name,
                   .real = {Real(steps[i])}});
  }
  return all;
}

/// Step 4, the first file. Returns the checksum that identifies the file; "", and writes no file,
/// if the optimizer has no state.
std::string save_optimizer(const fs::path& checkpoint, const std::vector<StateTensor>& optimizer) {
  if (optimizer.empty()) return "";
  return save_safetensors(optimizer_path(checkpoint), file_entries(optimizer), {{"format", "pt"}},
                          Checksums::crc32);
}

/// Step 4, the second file.
void save_network(const fs::path& checkpoint, const std::vector<StateTensor>& network,
                  const TrainingState& state, const std::string& optimizer) {
  Metadata metadata = {{"format", "pt"}, {kTrainingKey, state.to_json()}};
  if (!optimizer.empty()) metadata[kOptimizerKey] = optimizer;
  save_safetensors(checkpoint, file_entries(network), metadata, Checksums::crc32);
}

}  // namespace

void save_checkpoint(const fs::path& directory, const Trained& trained,
                     const TrainingState& state) {
  const std::vector<StateTensor> network = state_dict(trained.network),
                                 optimizer = optimizer_state(trained);
  for (const auto* tensors : {&network, &optimizer}) require_finite(*tensors, state);
  make_directory(directory);
  remove_leftovers(directory);
  const fs::path path = checkpoint_path(directory, state.steps);
  try {
    save_network(path, network, state, save_optimizer(path, optimizer));
  } catch (...) {
    remove_leftovers(directory);
    throw;
  }
}

// --- Loading -------------------------------------------------------------------------------------

namespace {

/// The text under `key`; "" if there is none.
std::string text_under(const SafetensorsFile& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  return found == file.metadata().end() ? "" : found->second;
}

/// The optimizer's state, whose file has this checksum.
std::vector<StateTensor> read_optimizer(const fs::path& checkpoint, const std::string& expected) {
  const fs::path path = optimizer_path(checkpoint);
  const SafetensorsFile file = load_safetensors(path);
  require(file.header_checksum() == expected,
          "{}: has the checksum {}, expected {} as {} says; the two files were not saved together, "
          "take another checkpoint",
          path.string(), file.header_checksum(), expected, checkpoint.string());
  return state_of(file.tensors(), FileTypes::exact);
}

}  // namespace

Checkpoint read_checkpoint(const fs::path& path) {
  const SafetensorsFile file = load_safetensors(path);
  refuse_incomplete(file.metadata(), path.string());
  const std::string training = text_under(file, kTrainingKey);
  require(!training.empty() && file.checksums() == Checksums::crc32,
          "{}: found weights without {}, expected a checkpoint; begin anew from such a file with "
          "--load",
          path.string(), training.empty() ? "a training state" : "checksums");
  const std::string optimizer = text_under(file, kOptimizerKey);
  return {.path = path,
          .training = training,
          .network = state_of(file.tensors(), FileTypes::exact),
          .optimizer =
              optimizer.empty() ? std::vector<StateTensor>() : read_optimizer(path, optimizer)};
}

std::optional<Checkpoint> newest_checkpoint(const fs::path& directory,
                                            const std::function<void(const std::string&)>& warn) {
  std::optional<Checkpoint> newest;
  newest_readable(
      directory, find_checkpoints(directory),
      [&](const fs::path& path) { newest = read_checkpoint(path); }, warn);
  return newest;
}

namespace {

/// The tensors of one of an optimizer's states: those whose names have its prefix.
std::vector<StateTensor> tensors_of(const std::string& state,
                                    const std::vector<StateTensor>& saved) {
  std::vector<StateTensor> found;
  std::ranges::copy_if(saved, std::back_inserter(found), [&](const StateTensor& tensor) {
    return tensor.name.starts_with(prefix_of(state));
  });
  return found;
}

std::vector<int64_t> steps_in(const Checkpoint& checkpoint, const Trained& trained) {
  std::map<std::string, double> saved;
  for (const StateTensor& tensor : tensors_of(kStep, checkpoint.optimizer)) {
    require(tensor.problem.empty() && tensor.shape.axes() == 0,
            "{} has shape {}, expected one number", tensor.name, tensor.shape.text());
    saved[tensor.name.substr(prefix_of(kStep).size())] = double(tensor.real.at(0));
  }
  return steps_of(trained.optimizer, saved,
                  TrainingState::from_json(checkpoint.training, checkpoint.path.string()));
}

/// Those of "exp_avg.conv1.weight", "exp_avg_sq.conv1.weight" and so on: exp_avg and exp_avg_sq.
std::set<std::string> states_saved(const std::vector<StateTensor>& tensors) {
  std::set<std::string> states;
  for (const StateTensor& tensor : tensors) {
    states.insert(tensor.name.substr(0, tensor.name.find('.')));
  }
  return states;
}

}  // namespace

void require_fitting(const Checkpoint& checkpoint, const Trained& trained) {
  within(checkpoint.path.string(), [&] { check_state_dict(trained.network, checkpoint.network); });
  std::set<std::string> states = states_saved(checkpoint.optimizer);
  states.erase(kStep);
  require_same_states(checkpoint.path, states, trained.optimizer);
  within(optimizer_path(checkpoint.path).string(), [&] {
    for (const OptimizerState& state : trained.optimizer.state()) {
      check_flat_state_dict(trained.parameters, prefix_of(state.name),
                            tensors_of(state.name, checkpoint.optimizer));
    }
    steps_in(checkpoint, trained);
  });
}

void restore(const Checkpoint& checkpoint, const Trained& trained) {
  require_fitting(checkpoint, trained);
  load_state_dict(trained.network, checkpoint.network);
  for (const OptimizerState& state : trained.optimizer.state()) {
    load_flat_state_dict(trained.parameters, state.ranges.at(0), prefix_of(state.name),
                         tensors_of(state.name, checkpoint.optimizer));
  }
  trained.optimizer.set_steps(steps_in(checkpoint, trained));
}

}  // namespace lockstep
