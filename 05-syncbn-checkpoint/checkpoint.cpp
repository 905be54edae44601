#include "05-syncbn-checkpoint/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cmath>
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
constexpr const char* kMomentum = "momentum.";

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

/// The momentum; empty if there is none.
std::vector<StateTensor> momentum_of(const Trained& trained) {
  const Tensor& velocity = trained.optimizer.velocity();
  if (!velocity.defined()) return {};
  return flat_state_dict(trained.parameters, velocity, kMomentum);
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
/// if there is no momentum.
std::string save_momentum(const fs::path& checkpoint, const std::vector<StateTensor>& momentum) {
  if (momentum.empty()) return "";
  return save_safetensors(optimizer_path(checkpoint), file_entries(momentum), {{"format", "pt"}},
                          Checksums::crc32);
}

/// Step 4, the second file.
void save_network(const fs::path& checkpoint, const std::vector<StateTensor>& network,
                  const TrainingState& state, const std::string& momentum) {
  Metadata metadata = {{"format", "pt"}, {kTrainingKey, state.to_json()}};
  if (!momentum.empty()) metadata[kOptimizerKey] = momentum;
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
                                 momentum = momentum_of(trained);
  for (const auto* tensors : {&network, &momentum}) require_finite(*tensors, state);
  make_directory(directory);
  remove_leftovers(directory);
  const fs::path path = checkpoint_path(directory, state.steps);
  try {
    save_network(path, network, state, save_momentum(path, momentum));
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

/// The momentum whose file has this checksum.
std::vector<StateTensor> read_momentum(const fs::path& checkpoint, const std::string& expected) {
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
  const std::string momentum = text_under(file, kOptimizerKey);
  return {
      .path = path,
      .training = training,
      .network = state_of(file.tensors(), FileTypes::exact),
      .momentum = momentum.empty() ? std::vector<StateTensor>() : read_momentum(path, momentum)};
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

void require_fitting(const Checkpoint& checkpoint, const Trained& trained) {
  within(checkpoint.path.string(), [&] { check_state_dict(trained.network, checkpoint.network); });
  const bool has_momentum = trained.optimizer.velocity().defined();
  require(has_momentum || checkpoint.momentum.empty(),
          "{}: was saved with momentum, this optimizer has none; give it the same --momentum",
          checkpoint.path.string());
  if (!has_momentum) return;
  within(optimizer_path(checkpoint.path).string(),
         [&] { check_flat_state_dict(trained.parameters, kMomentum, checkpoint.momentum); });
}

void restore(const Checkpoint& checkpoint, const Trained& trained) {
  require_fitting(checkpoint, trained);
  load_state_dict(trained.network, checkpoint.network);
  if (!trained.optimizer.velocity().defined()) return;
  load_flat_state_dict(trained.parameters, trained.optimizer.velocity(), kMomentum,
                       checkpoint.momentum);
}

}  // namespace lockstep
