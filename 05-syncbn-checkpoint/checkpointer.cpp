#include "05-syncbn-checkpoint/checkpointer.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <utility>

#include "05-syncbn-checkpoint/training_settings.h"
#include "common/core/error.h"
#include "common/io/file.h"
#include "common/io/json.h"

namespace lockstep {
using nlohmann::json;

Checkpointer::Checkpointer(const Trained& trained, Communicator& comm, ExchangeTexts exchange,
                           CheckpointOptions options)
    : trained_(trained), comm_(comm), exchange_(std::move(exchange)), options_(std::move(options)) {
  require(
      options_.keep >= 2,
      "--keep: {} checkpoints, expected 2 or more: should the newest be damaged, the one before "
      "it is needed",
      options_.keep);
  if (!options_.say) {
    options_.say = [](const std::string& line) { fmt::print("{}\n", line); };
  }
  if (!options_.warn) {
    options_.warn = [](const std::string& line) { fmt::print(stderr, "warning: {}\n", line); };
  }
}

// --- Saving --------------------------------------------------------------------------------------

namespace {

/// The size of a checkpoint, with the optimizer's file if there is one.
std::uintmax_t bytes_of(const std::filesystem::path& checkpoint) {
  std::error_code none;
  const std::uintmax_t optimizer = std::filesystem::file_size(optimizer_path(checkpoint), none);
  return std::filesystem::file_size(checkpoint) + (none ? 0 : optimizer);
}

}  // namespace

void Checkpointer::save(const TrainingState& state) {
  on_rank_0(comm_.rank(), exchange_, [&] {
    save_here(state);
    return "";
  });
}

void Checkpointer::save_here(const TrainingState& state) {
  const Health health = trained_.optimizer.health().to_host().at(0);  // waits for the last step
  if (health.failed_step >= 0) {
    fail<NonFinite>(
        "step {}: the loss or a gradient is not finite; nothing was saved after it, the "
        "checkpoints in {} are good",
        health.failed_step, options_.directory.string());
  }
  const auto begin = std::chrono::steady_clock::now();
  save_checkpoint(options_.directory, trained_, state);
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
  const std::filesystem::path path = checkpoint_path(options_.directory, state.steps);
  options_.say(
      fmt::format("Saved {}: {} bytes in {:.1f} ms", path.string(), bytes_of(path), time.count()));
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
  std::string other = "the order of sums, so that weights will differ in their last bits";
  (settings.value("pad", false) ? other : same) += ", which samples each global batch has";
  if (!settings.value("sync_bn", true))
    other += ", the part of a batch that is normalised together";
  if (settings.value("accumulate", 1) > 1) {
    other += ", the samples of a micro-batch, which batch normalisation sees together";
  }
  return fmt::format("The same as before: {}. Not the same: {}", same, other);
}

}  // namespace

TrainingState Checkpointer::resume(const std::string& source, const TrainingState& begin) {
  const std::string decision = on_rank_0(comm_.rank(), exchange_, [&] {
    const std::optional<Checkpoint> checkpoint = choose(source);
    // Here, and not only at the first save: hours may pass in between.
    if (!options_.directory.empty()) lock_directory();
    return checkpoint ? restore_here(*checkpoint, begin) : "";
  });
  if (decision.empty()) return begin;
  broadcast_tensors();
  const json scalars = parse_json(decision);
  set_batches_tracked(trained_.network, scalars["batches_tracked"].get<std::vector<int64_t>>());
  return TrainingState::from_json(scalars["state"].get<std::string>(), "rank 0");
}

/// Makes the directory, if need be, and keeps other runs out of it: they would remove what this one
/// saves. The lock ends with the process; file systems without locks have none.
void Checkpointer::lock_directory() {
  make_directory(options_.directory);
  lock_ = Descriptor(::open(options_.directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  require(
      ::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK,
      "--checkpoint-dir {}: another run saves to it; wait until that has ended, or give another "
      "directory",
      options_.directory.string());
}

/// Rank 0 takes over the checkpoint's state. Returns what the others need besides its tensors.
std::string Checkpointer::restore_here(const Checkpoint& checkpoint, const TrainingState& begin) {
  const TrainingState state = checked(checkpoint, begin);
  restore(checkpoint, trained_);
  options_.say(fmt::format("Resumed from {}: {} steps, {} of them in epoch {}",
                           checkpoint.path.string(), state.steps, state.step_in_epoch,
                           state.epoch + 1));
  const json scalars = {{"state", state.to_json()},
                        {"batches_tracked", batches_tracked(trained_.network)}};
  return scalars.dump();
}

/// The checkpoint that `source` means; nothing if the run begins anew.
std::optional<Checkpoint> Checkpointer::choose(const std::string& source) {
  if (source == "auto") {
    std::optional<Checkpoint> newest = newest_checkpoint(options_.directory, options_.warn);
    if (!newest) {
      options_.say(
          fmt::format("No checkpoint in {}: training begins anew", options_.directory.string()));
      return {};
    }
    for (const FoundCheckpoint& found : find_checkpoints(options_.directory)) {
      if (found.path == newest->path) break;
      damaged_.insert(found.steps);
    }
    return newest;
  }
  if (source.empty()) {
    require_no_later("the beginning", -1);
    return {};
  }
  Checkpoint named = read_checkpoint(source);
  require_own_directory(named.path);
  require_no_later(source, TrainingState::from_json(named.training, source).steps);
  return named;
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
  require(
      saved.step_in_epoch <= per_epoch &&
          saved.steps == saved.epoch * per_epoch + saved.step_in_epoch,
      "{}: found step {} of epoch {} and {} steps in all, which contradict each other: an epoch "
      "has {} steps; take another checkpoint",
      path, saved.step_in_epoch, saved.epoch, saved.steps, per_epoch);
}

/// The checkpoint's training state, if this run may continue from it.
TrainingState Checkpointer::checked(const Checkpoint& checkpoint,
                                    const TrainingState& begin) const {
  const std::string path = checkpoint.path.string();
  TrainingState saved = TrainingState::from_json(checkpoint.training, path);
  require_saved_settings(saved.settings, begin.settings, path);
  require_counters(saved, path);
  require_fitting(checkpoint, trained_);
  require_world_size(checkpoint, saved, begin);
  const std::string differs = other_order_of_sums(saved.settings, begin.settings);
  if (!differs.empty()) {
    options_.warn(
        fmt::format("{} goes on with {}: weights will differ in their last bits", path, differs));
  }
  saved.world_size = begin.world_size;
  saved.settings = begin.settings;
  return saved;
}

void Checkpointer::require_world_size(const Checkpoint& checkpoint, const TrainingState& saved,
                                      const TrainingState& begin) const {
  if (saved.world_size == begin.world_size) return;
  require(options_.allow_world_size,
          "{} was saved by {} ranks, this run has {}; start as many, or allow the change with "
          "--allow-world-size-change (the weights will then differ in their last bits)",
          checkpoint.path.string(), saved.world_size, begin.world_size);
  options_.warn(fmt::format("{} was saved by {} ranks, this run has {}. {}",
                            checkpoint.path.string(), saved.world_size, begin.world_size,
                            what_stays(begin.settings)));
}

/// The network and the optimizer's state of all ranks become rank 0's.
void Checkpointer::broadcast_tensors() const {
  const Stream stream = trained_.parameters.stream();
  comm_.broadcast(stream, trained_.parameters.values(), 0);
  if (!trained_.parameters.buffers().empty()) {
    comm_.broadcast(stream, trained_.parameters.buffer_values(), 0);
  }
  for (const OptimizerState& state : trained_.optimizer.state()) {
    for (const Tensor& range : state.ranges) comm_.broadcast(stream, range, 0);
  }
}

}  // namespace lockstep
