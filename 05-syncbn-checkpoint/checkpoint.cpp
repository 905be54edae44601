#include "05-syncbn-checkpoint/checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <string_view>
#include <system_error>

#include "common/core/error.h"
#include "common/io/file.h"
#include "common/io/safetensors.h"
#include "common/step/weights_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kSuffix = ".safetensors";
constexpr std::string_view kOptimizerSuffix = ".optimizer.safetensors";
constexpr std::string_view kTemporarySuffix = ".tmp";  // write_file_atomically()
constexpr const char* kTrainingKey = "lockstep.training";
constexpr const char* kOptimizerKey = "lockstep.optimizer";

/// What the names of an optimizer's state begin with.
std::string prefix_of(const std::string& state) { return state + "."; }

/// The step in a checkpoint's file name; nothing for other files.
std::optional<int64_t> steps_of(const std::string& name) {
  const std::string_view text = name;
  if (!text.starts_with(kPrefix) || !text.ends_with(kSuffix)) return {};
  int64_t steps = 0;
  const char* const end = text.data() + text.size() - kSuffix.size();
  const auto [rest, error] = std::from_chars(text.data() + kPrefix.size(), end, steps);
  if (error != std::errc() || rest != end) return {};
  if (steps < 0 || checkpoint_path("", steps) != name) return {};
  return steps;
}

std::vector<fs::path> files_of(const fs::path& directory, std::error_code& error) {
  std::vector<fs::path> files;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    files.push_back(entry->path());
  }
  return files;
}

}  // namespace

fs::path checkpoint_path(const fs::path& directory, int64_t steps) {
  return directory / fmt::format("{}{:09}{}", kPrefix, steps, kSuffix);
}

fs::path optimizer_path(const fs::path& checkpoint) {
  return fs::path(checkpoint).replace_extension(kOptimizerSuffix);
}

std::vector<FoundCheckpoint> find_checkpoints(const fs::path& directory) {
  std::error_code error;
  const std::vector<fs::path> files = files_of(directory, error);
  if (error && error != std::errc::no_such_file_or_directory) {
    fail<EnvironmentError>(
        "cannot look for checkpoints in {}: {}; give a directory that you may read",
        directory.string(), error.message());
  }
  std::vector<FoundCheckpoint> found;
  for (const fs::path& file : files) {
    const std::optional<int64_t> steps = steps_of(file.filename().string());
    if (steps) found.push_back({*steps, file});
  }
  std::ranges::sort(found, std::greater<>(), &FoundCheckpoint::steps);
  return found;
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
  return all;
}

/// A run can go wrong before its loss shows it: running variances overflow first.
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

/// Whether a file was left by a save that did not finish.
bool is_leftover(const fs::path& file) {
  const std::string name = file.filename().string();
  if (name.ends_with(kTemporarySuffix)) return name.starts_with(fmt::format(".{}", kPrefix));
  if (!name.starts_with(kPrefix) || !name.ends_with(kOptimizerSuffix)) return false;
  const std::string stem = name.substr(0, name.size() - kOptimizerSuffix.size());
  std::error_code error;
  return !fs::exists(file.parent_path() / fmt::format("{}{}", stem, kSuffix), error) && !error;
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

void remove_leftovers(const fs::path& directory) {
  std::error_code ignored;
  for (const fs::path& file : files_of(directory, ignored)) {
    if (is_leftover(file)) fs::remove(file, ignored);
  }
}

void remove_old_checkpoints(const fs::path& directory, int64_t steps, int64_t keep,
                            const std::set<int64_t>& damaged) {
  std::vector<FoundCheckpoint> found = find_checkpoints(directory);
  std::erase_if(found, [&](const FoundCheckpoint& other) {
    return other.steps > steps || damaged.contains(other.steps);
  });
  for (auto old = found.begin() + std::min<int64_t>(keep, std::ssize(found)); old != found.end();
       ++old) {
    remove_file(old->path);
    remove_file(optimizer_path(old->path));
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
  const std::vector<FoundCheckpoint> found = find_checkpoints(directory);
  for (const FoundCheckpoint& checkpoint : found) {
    try {
      return read_checkpoint(checkpoint.path);
    } catch (const Error& error) {
      const bool last = checkpoint.path == found.back().path;
      warn(last ? error.what() : fmt::format("{}; the one before it is tried", error.what()));
    }
  }
  require(found.empty(),
          "{}: found {} checkpoint{}, none of which can be read as such; give another "
          "--checkpoint-dir to begin anew, with --load FILE from weights that are intact",
          directory.string(), found.size(), found.size() == 1 ? "" : "s");
  return {};
}

namespace {

/// The tensors of one of an optimizer's states: those whose names have its prefix.
std::vector<StateTensor> tensors_of(const OptimizerState& state,
                                    const std::vector<StateTensor>& saved) {
  std::vector<StateTensor> found;
  std::ranges::copy_if(saved, std::back_inserter(found), [&](const StateTensor& tensor) {
    return tensor.name.starts_with(prefix_of(state.name));
  });
  return found;
}

/// The names of an optimizer's states, in words.
std::string listed(const std::set<std::string>& states) {
  return states.empty() ? "no state" : fmt::format("{}", fmt::join(states, " and "));
}

/// Those of "exp_avg.conv1.weight", "exp_avg_sq.conv1.weight" and so on: exp_avg and exp_avg_sq.
std::string states_saved(const std::vector<StateTensor>& tensors) {
  std::set<std::string> states;
  for (const StateTensor& tensor : tensors) {
    states.insert(tensor.name.substr(0, tensor.name.find('.')));
  }
  return listed(states);
}

std::string states_of(const Optimizer& optimizer) {
  std::set<std::string> states;
  for (const OptimizerState& state : optimizer.state()) states.insert(state.name);
  return listed(states);
}

}  // namespace

void require_fitting(const Checkpoint& checkpoint, const Trained& trained) {
  within(checkpoint.path.string(), [&] { check_state_dict(trained.network, checkpoint.network); });
  const std::string saved = states_saved(checkpoint.optimizer), own = states_of(trained.optimizer);
  require(saved == own,
          "{}: the optimizer that was saved has {}, this run's has {}; give it the same "
          "--optimizer and --momentum",
          checkpoint.path.string(), saved, own);
  for (const OptimizerState& state : trained.optimizer.state()) {
    within(optimizer_path(checkpoint.path).string(), [&] {
      check_flat_state_dict(trained.parameters, prefix_of(state.name),
                            tensors_of(state, checkpoint.optimizer));
    });
  }
}

void restore(const Checkpoint& checkpoint, const Trained& trained) {
  require_fitting(checkpoint, trained);
  load_state_dict(trained.network, checkpoint.network);
  for (const OptimizerState& state : trained.optimizer.state()) {
    load_flat_state_dict(trained.parameters, state.ranges.at(0), prefix_of(state.name),
                         tensors_of(state, checkpoint.optimizer));
  }
}

}  // namespace lockstep
