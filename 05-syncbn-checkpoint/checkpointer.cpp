#include "05-syncbn-checkpoint/checkpointer.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "05-syncbn-checkpoint/training_settings.h"
#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/file.h"
#include "common/io/json.h"

namespace lockstep {
using nlohmann::json;

Checkpointer::Checkpointer(std::unique_ptr<StateFiles> files, Communicator& comm,
                           ExchangeTexts exchange, CheckpointOptions options)
    : files_(std::move(files)), ranks_{comm, std::move(exchange)}, options_(std::move(options)) {
  require(
      options_.keep >= 2,
      "--keep: {} checkpoints, expected 2 or more: should the newest be damaged, the one before "
      "it is needed",
      options_.keep);
  if (!options_.say) {
    options_.say = [](const std::string& line) { print_clean("{}\n", line); };
  }
  if (!options_.warn) {
    options_.warn = warn;
  }
}

// --- Saving --------------------------------------------------------------------------------------

void Checkpointer::save(const TrainingState& state) {
  const auto begin = std::chrono::steady_clock::now();
  const int64_t bytes = files_->save(ranks_, options_.directory, state);
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
  ranks_.on_first([&] {
    saved(state, fmt::format("{} bytes in {:.1f} ms", bytes, time.count()));
    return "";
  });
}

/// Rank 0 says so, and removes older ones.
void Checkpointer::saved(const TrainingState& state, const std::string& report) {
  const std::string path = checkpoint_path(options_.directory, state.steps).string();
  options_.say(fmt::format("Saved {}: {}", path, report));
  damaged_.erase(state.steps);
  try {
    remove_old_checkpoints(options_.directory, state.steps, options_.keep, damaged_);
  } catch (const EnvironmentError& error) {
    options_.warn(
        fmt::format("step {} is saved, but an older one stays: {}", state.steps, error.what()));
  }
}

// --- Resuming ------------------------------------------------------------------------------------

namespace {

/// What stays the same, and what does not, if the run continues with another number of ranks.
std::string what_stays(const json& settings) {
  std::string same = "parameters, the optimizer's state, learning rate, dropout";
  std::string other = "the order of sums, so that weights will differ by rounding errors";
  (settings.value("pad", false) ? other : same) += ", which samples each global batch has";
  if (!settings.value("sync_bn", true))
    other += ", the part of a batch that is normalised together";
  if (settings.value("accumulate", 1) > 1) {
    other += ", the samples of a micro-batch, which batch normalisation sees together";
  }
  return fmt::format("The same as before: {}. Not the same: {}", same, other);
}

}  // namespace

TrainingState Checkpointer::resume(const std::string& source, const TrainingState& begin) try {
  // Before the choice, and not at the first save: another run must not remove what this one
  // chooses, nor save to where this one found nothing.
  ranks_.on_first([&] {
    if (!options_.directory.empty() && !lock_) lock_.emplace(options_.directory);
    return "";
  });
  const std::optional<std::filesystem::path> path = choose(source);
  if (!path) return begin;
  const std::string decision =
      ranks_.on_first([&] { return checked(path->string(), begin).to_json(); });
  files_->restore(ranks_);
  TrainingState state = TrainingState::from_json(decision, "rank 0");
  if (ranks_.is_first()) {
    options_.say(fmt::format("Resumed from {}: {} steps, {} of them in epoch {}", path->string(),
                             state.steps, state.step_in_epoch, state.epoch + 1));
  }
  return state;
} catch (...) {
  lock_.reset();  // the error may end the program without unwinding, and would leave the file
  throw;
}

/// The checkpoint that `source` means, which is read; nothing if the run begins anew.
std::optional<std::filesystem::path> Checkpointer::choose(const std::string& source) {
  if (source == "auto") return newest();
  if (!source.empty()) training_ = files_->read(ranks_, source);
  ranks_.on_first([&] {
    if (source.empty()) {
      require_no_later("the beginning", -1);
    } else {
      require_own_directory(source);
      require_no_later(source, TrainingState::from_json(training_, source).steps);
    }
    return "";
  });
  if (source.empty()) return {};
  return source;
}

/// The newest that can be read. Rank 0 says which there are: the directory may have another path on
/// another rank.
std::optional<std::filesystem::path> Checkpointer::newest() {
  const std::string steps = ranks_.on_first([&] {
    json found = json::array();
    for (const FoundCheckpoint& each : find_checkpoints(options_.directory)) {
      found.push_back(each.steps);
    }
    return found.dump();
  });
  std::vector<FoundCheckpoint> found;
  for (const int64_t each : parse_json(steps).get<std::vector<int64_t>>()) {
    found.push_back({each, checkpoint_path(options_.directory, each)});
  }
  const std::optional<FoundCheckpoint> newest = newest_readable(
      options_.directory, found,
      [&](const std::filesystem::path& path) { training_ = files_->read(ranks_, path); },
      [&](const std::string& line) {
        if (ranks_.is_first()) options_.warn(line);
      });
  for (const FoundCheckpoint& each : found) {
    if (newest && each.steps > newest->steps) damaged_.insert(each.steps);
  }
  if (newest) return newest->path;
  if (ranks_.is_first()) {
    options_.say(
        fmt::format("No checkpoint in {}: training begins anew", options_.directory.string()));
  }
  return {};
}

/// Otherwise checkpoints of another run would later be removed as this one's old ones.
void Checkpointer::require_own_directory(const std::filesystem::path& source) const {
  std::error_code elsewhere;
  const std::filesystem::path folder = source.has_parent_path() ? source.parent_path() : ".";
  require(options_.directory.empty() || find_checkpoints(options_.directory).empty() ||
              std::filesystem::equivalent(folder, options_.directory, elsewhere),
          "--checkpoint-dir: {} holds checkpoints, but {}, from which this run would go on, is not "
          "one of them; give an empty directory",
          options_.directory.string(), source.string());
}

/// The next resume would take later checkpoints for this run's, and they would hide its own.
void Checkpointer::require_no_later(const std::string& source, int64_t steps) const {
  const std::vector<FoundCheckpoint> found = find_checkpoints(options_.directory);
  require(found.empty() || found.front().steps <= steps,
          "{} is later than {}, from where this run would go on, and would be taken for its; "
          "resume from it (auto), remove it, or give another directory",
          found.empty() ? "" : found.front().path.string(), source);
}

/// With PyTorch's padding the batches of an epoch depend on the number of ranks, which may have
/// changed since.
void Checkpointer::require_counters(const TrainingState& saved, const std::string& path) const {
  const int64_t per_epoch = options_.steps_per_epoch;
  if (per_epoch == 0 || saved.settings.value("pad", false)) return;
  const int64_t of_whole_epochs = saved.steps - saved.step_in_epoch;
  require(
      saved.step_in_epoch <= per_epoch && of_whole_epochs % per_epoch == 0 &&
          of_whole_epochs / per_epoch == saved.epoch,
      "{}: found step {} of epoch {} and {} steps in all, which contradict each other: an epoch "
      "has {} steps; take another checkpoint",
      path, saved.step_in_epoch, saved.epoch, saved.steps, per_epoch);
}

/// The training state of the checkpoint that was read, if this run may continue from it.
TrainingState Checkpointer::checked(const std::string& path, const TrainingState& begin) const {
  TrainingState saved = TrainingState::from_json(training_, path);
  require_saved_settings(saved.settings, begin.settings, path);
  require_counters(saved, path);
  files_->require_fitting();
  require_world_size(saved, begin, path);
  const std::string differs = other_order_of_sums(saved.settings, begin.settings);
  if (!differs.empty()) {
    options_.warn(
        fmt::format("{} goes on with {}: weights will differ by rounding errors", path, differs));
  }
  saved.world_size = begin.world_size;
  saved.settings = begin.settings;
  return saved;
}

void Checkpointer::require_world_size(const TrainingState& saved, const TrainingState& begin,
                                      const std::string& path) const {
  if (saved.world_size == begin.world_size) return;
  const std::string differs =
      fmt::format("{} was saved by {} rank{}, this run has {}", path, saved.world_size,
                  saved.world_size == 1 ? "" : "s", begin.world_size);
  require(options_.allow_world_size,
          "{}; start as many, or allow the change with --allow-world-size-change (the weights will "
          "then differ by rounding errors)",
          differs);
  options_.warn(fmt::format("{}. {}", differs, what_stays(begin.settings)));
}

}  // namespace lockstep
