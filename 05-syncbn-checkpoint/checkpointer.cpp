#include "05-syncbn-checkpoint/checkpointer.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/file.h"
#include "common/io/json.h"

namespace lockstep {
using nlohmann::json;

Checkpointer::Checkpointer(SavingOptions options, Communicator& comm, ExchangeTexts exchange,
                           int64_t steps_per_epoch, std::function<void()> settle)
    : options_(std::move(options)),
      comm_(comm),
      exchange_(std::move(exchange)),
      together_([](const std::function<void()>& work) { work(); }),
      steps_per_epoch_(steps_per_epoch),
      settle_(std::move(settle)) {
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

Checkpointer::Checkpointer(SavingOptions options, Communicator& comm, ProcessGroup& group,
                           int64_t steps_per_epoch, std::function<void()> settle)
    : Checkpointer(std::move(options), comm, group.exchanger(), steps_per_epoch,
                   std::move(settle)) {
  together_ = [&group](const std::function<void()>& work) { group.together(work); };
}

// --- Saving --------------------------------------------------------------------------------------

void Checkpointer::after_step(const TrainingState& state) {
  const int64_t every = options_.save_every;
  if (every > 0 && state.steps % every == 0) save(state);
}

void Checkpointer::after_epoch(TrainingState& state, double accuracy) {
  if (state.step_in_epoch == steps_per_epoch_) state.count_epoch(accuracy);
  save(state);
}

void Checkpointer::save(const TrainingState& state) {
  if (options_.directory.empty()) return;
  settle_();
  try {
    const auto begin = std::chrono::steady_clock::now();
    const int64_t bytes = write(with_scale(state));
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    on_first([&] {
      say_saved(state, fmt::format("{} bytes in {:.1f} ms", bytes, time.count()));
      return "";
    });
    failure_.clear();
  } catch (const EnvironmentError& error) {
    failure_ = error.what();
    options_.warn(fmt::format("rank {}: step {} is not saved: {}; training goes on", comm_.rank(),
                              state.steps, failure_));
  }
}

void Checkpointer::finish() const {
  together_([&] {
    if (!failure_.empty()) fail<EnvironmentError>("the last checkpoint is missing: {}", failure_);
  });
}

/// Rank 0 says so, and removes older ones.
void Checkpointer::say_saved(const TrainingState& state, const std::string& report) {
  const std::string path = checkpoint_path(directory(), state.steps).string();
  options_.say(fmt::format("Saved {}: {}", path, report));
  damaged_.erase(state.steps);
  try {
    remove_old_checkpoints(directory(), state.steps, options_.keep, damaged_);
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

/// The state with the scale that fp16's gradients have now.
TrainingState Checkpointer::with_scale(TrainingState state) const {
  if (!optimizer().loss_scale().defined()) return state;
  const Health health = optimizer().health().to_host().at(0);
  state.loss_scale = health.scale;
  state.good_steps = health.good_steps, state.skipped_steps = health.skipped;
  return state;
}

TrainingState Checkpointer::resume(const TrainingState& first) {
  TrainingState begin = first, state;
  begin.sample_parts = sample_parts();
  together_([&] { state = resumed(begin); });
  return state;
}

TrainingState Checkpointer::resumed(const TrainingState& begin) try {
  // Before the choice, and not at the first save: another run must not remove what this one
  // chooses, nor save to where this one found nothing.
  on_first([&] {
    if (!options_.directory.empty() && !lock_) lock_.emplace(options_.directory);
    return "";
  });
  const std::optional<std::filesystem::path> path = choose();
  if (!path) return begin;
  const std::string decision = on_first([&] { return checked(path->string(), begin).to_json(); });
  restore();
  optimizer().round();  // what this rank has read, or rank 0 has sent
  TrainingState state = TrainingState::from_json(decision, "rank 0");
  if (state.loss_scale > 0) {
    optimizer().set_scale(Real(state.loss_scale), state.good_steps, state.skipped_steps);
  }
  if (is_first()) {
    options_.say(fmt::format("Resumed from {}: {} steps, {} of them in epoch {}", path->string(),
                             state.steps, state.step_in_epoch, state.epoch + 1));
  }
  return state;
} catch (...) {
  lock_.reset();  // the error may end the program without unwinding, and would leave the file
  throw;
}

/// The checkpoint that --resume means, which is read; nothing if the run begins anew.
std::optional<std::filesystem::path> Checkpointer::choose() {
  const std::string& source = options_.resume;
  if (source == "auto") return newest();
  if (!source.empty()) training_ = read(source);
  on_first([&] {
    if (source.empty()) {
      require_no_later("the beginning", -1);
    } else {
      require_own_directory();
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
  const std::string steps = on_first([&] { return json(find_checkpoints(directory())).dump(); });
  const auto found = parse_json(steps).get<std::vector<int64_t>>();
  const std::optional<int64_t> newest = newest_readable(
      directory(), found, [&](const std::filesystem::path& path) { training_ = read(path); },
      [&](const std::string& line) {
        if (is_first()) options_.warn(line);
      });
  for (const int64_t each : found) {
    if (newest && each > *newest) damaged_.insert(each);
  }
  if (newest) return checkpoint_path(directory(), *newest);
  if (is_first()) {
    options_.say(fmt::format("No checkpoint in {}: training begins anew", options_.directory));
  }
  return {};
}

/// Otherwise checkpoints of another run would later be removed as this one's old ones.
void Checkpointer::require_own_directory() const {
  const std::filesystem::path source = options_.resume;
  std::error_code elsewhere;
  const std::filesystem::path folder = source.has_parent_path() ? source.parent_path() : ".";
  require(options_.directory.empty() || find_checkpoints(directory()).empty() ||
              std::filesystem::equivalent(folder, directory(), elsewhere),
          "--checkpoint-dir: {} holds checkpoints, but {}, from which this run would go on, is not "
          "one of them; give an empty directory",
          options_.directory, source.string());
}

/// The next resume would take later checkpoints for this run's, and they would hide its own.
void Checkpointer::require_no_later(const std::string& source, int64_t steps) const {
  if (options_.directory.empty()) return;
  const std::vector<int64_t> found = find_checkpoints(directory());
  require(found.empty() || found.front() <= steps,
          "{} is later than {}, from which this run would go on, and would be mistaken for one of "
          "this run's; "
          "resume from it (auto), remove it, or give another directory",
          found.empty() ? "" : checkpoint_path(directory(), found.front()).string(), source);
}

/// With PyTorch's padding the batches of an epoch depend on the number of ranks, which may have
/// changed since.
void Checkpointer::require_counters(const TrainingState& saved, const std::string& path) const {
  const int64_t per_epoch = steps_per_epoch_;
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
  require_fitting();
  require_world_size(saved, begin, path);
  const std::string differs = other_order_of_sums(saved.settings, begin.settings);
  if (!differs.empty()) {
    options_.warn(
        fmt::format("{} goes on with {}: weights will differ by rounding errors", path, differs));
  }
  saved.world_size = begin.world_size;
  saved.sample_parts = begin.sample_parts;
  saved.settings = begin.settings;
  return saved;
}

void Checkpointer::require_world_size(const TrainingState& saved, const TrainingState& begin,
                                      const std::string& path) const {
  const bool as_many = saved.world_size == begin.world_size;
  const int64_t before = saved.parts_of_batch(), now = begin.parts_of_batch();
  if (as_many && before == now) return;
  std::string differs =
      fmt::format("{} was saved by {} rank{}, this run has {}", path, saved.world_size,
                  saved.world_size == 1 ? "" : "s", begin.world_size);
  if (as_many) differs += fmt::format(" in a mesh that divides a batch by {}, not {}", now, before);
  require(options_.allow_world_size,
          "{}; {}, or allow the change with --allow-world-size-change (the weights will then "
          "differ by rounding errors)",
          differs, as_many ? "give the --mesh that it was saved with" : "start as many");
  options_.warn(fmt::format("{}. {}", differs, what_stays(begin.settings)));
}

// --- Rank 0 alone --------------------------------------------------------------------------------

int64_t RankZeroCheckpointer::write(const TrainingState& state) {
  return std::stoll(on_first([&] {
    require_good_steps(trained_.optimizer, directory());
    return std::to_string(save_checkpoint(directory(), trained_, state));
  }));
}

std::string RankZeroCheckpointer::read(const std::filesystem::path& path) {
  return on_first([&] {
    checkpoint_ = read_checkpoint(path);
    return checkpoint_.training;
  });
}

/// Rank 0 takes over what it has read; then the tensors of all ranks become rank 0's.
void RankZeroCheckpointer::restore() {
  const json counts = parse_json(on_first([&] {
    lockstep::restore(checkpoint_, trained_);
    checkpoint_ = {};
    return json{batches_tracked(trained_.network), trained_.optimizer.steps()}.dump();
  }));
  set_batches_tracked(trained_.network, counts.at(0).get<std::vector<int64_t>>());
  trained_.optimizer.set_steps(counts.at(1).get<std::vector<int64_t>>());
  const Stream stream = trained_.parameters.stream();
  comm().broadcast(stream, trained_.parameters.values(), 0);
  if (!trained_.parameters.buffers().empty()) {
    comm().broadcast(stream, trained_.parameters.buffer_values(), 0);
  }
  for (const OptimizerState& state : trained_.optimizer.state()) {
    comm().broadcast(stream, state.ranges.at(0), 0);
  }
}

}  // namespace lockstep
