#include "05-syncbn-checkpoint/checkpoint.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <iterator>
#include <string_view>
#include <system_error>

#include "common/core/error.h"
#include "common/io/file.h"
#include "common/io/safetensors.h"
#include "common/training/weights_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kSuffix = ".safetensors";
constexpr std::string_view kOptimizer = "optimizer";
constexpr std::string_view kTemporarySuffix = ".tmp";  // write_file_atomically()

/// Takes a whole number that `text` begins with; nothing if there is none.
std::optional<int64_t> take_number(std::string_view& text) {
  int64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0) return {};
  text.remove_prefix(size_t(rest - text.data()));
  return number;
}

/// A name of the form step-000000938[.what].safetensors.
struct CheckpointName {
  int64_t steps = 0;
  std::string what{};  // empty for the checkpoint's own file
};

std::optional<CheckpointName> parse_name(const std::string& name) {
  std::string_view text = name;
  if (!text.starts_with(kPrefix) || !text.ends_with(kSuffix)) return {};
  text.remove_prefix(kPrefix.size());
  const std::optional<int64_t> steps = take_number(text);
  if (!steps) return {};
  const std::string own = checkpoint_path("", *steps).string();
  if (name == own) return CheckpointName{*steps};
  if (!name.starts_with(own.substr(0, own.size() - kSuffix.size())) || !text.starts_with('.')) {
    return {};
  }
  text.remove_prefix(1);
  text.remove_suffix(std::min(text.size(), kSuffix.size()));
  return CheckpointName{*steps, std::string(text)};
}

/// rank-1-of-4
bool is_shard(std::string_view what) {
  for (const std::string_view word : {"rank-", "-of-"}) {
    if (!what.starts_with(word)) return false;
    what.remove_prefix(word.size());
    if (!take_number(what)) return false;
  }
  return what.empty();
}

/// Whether Lockstep gives such names to files that belong to a checkpoint.
bool belongs_to_one(const CheckpointName& name) {
  return name.what == kOptimizer || is_shard(name.what);
}

std::vector<fs::path> files_of(const fs::path& directory, std::error_code& error) {
  std::vector<fs::path> files;
  for (fs::directory_iterator entry(directory.empty() ? "." : directory, error), end;
       !error && entry != end; entry.increment(error)) {
    files.push_back(directory / entry->path().filename());
  }
  return files;
}

fs::path named(const fs::path& checkpoint, std::string_view what) {
  return fs::path(checkpoint).replace_extension(fmt::format(".{}{}", what, kSuffix));
}

}  // namespace

fs::path checkpoint_path(const fs::path& directory, int64_t steps) {
  return directory / fmt::format("{}{:09}{}", kPrefix, steps, kSuffix);
}

fs::path optimizer_path(const fs::path& checkpoint) { return named(checkpoint, kOptimizer); }

fs::path shard_path(const fs::path& checkpoint, int rank, int world_size) {
  return named(checkpoint, fmt::format("rank-{}-of-{}", rank, world_size));
}

std::vector<int64_t> find_checkpoints(const fs::path& directory) {
  std::error_code error;
  const std::vector<fs::path> files = files_of(directory, error);
  if (error && error != std::errc::no_such_file_or_directory) {
    fail<EnvironmentError>(
        "cannot look for checkpoints in {}: {}; give a directory that you may read",
        directory.string(), error.message());
  }
  std::vector<int64_t> found;
  for (const fs::path& file : files) {
    const std::optional<CheckpointName> name = parse_name(file.filename().string());
    if (name && name->what.empty()) found.push_back(name->steps);
  }
  std::ranges::sort(found, std::greater<>());
  return found;
}

std::optional<int64_t> newest_readable(const fs::path& directory, const std::vector<int64_t>& found,
                                       const std::function<void(const fs::path&)>& read,
                                       const std::function<void(const std::string&)>& warn) {
  for (const int64_t steps : found) {
    try {
      read(checkpoint_path(directory, steps));
      return steps;
    } catch (const PeerLost&) {
      throw;
    } catch (const Error& error) {
      warn(steps == found.back() ? error.what()
                                 : fmt::format("{}; the one before it is tried", error.what()));
    }
  }
  require(found.empty(),
          "{}: found {} checkpoint{}, none of which can be read as such; give another "
          "--checkpoint-dir to begin anew, with --load FILE from weights that are intact",
          directory.string(), found.size(), found.size() == 1 ? "" : "s");
  return {};
}

// --- Locking -------------------------------------------------------------------------------------

DirectoryLock::DirectoryLock(const fs::path& directory) : path_(directory / ".lock") {
  const auto is_at_path = [&](const struct stat& own) {
    struct stat now = {};
    return ::lstat(path_.c_str(), &now) == 0 && now.st_dev == own.st_dev &&
           now.st_ino == own.st_ino;
  };
  // The run that had the lock may remove the directory before open(), and the file before flock().
  for (struct stat own = {}; !file_.is_open() || !is_at_path(own);) {
    const std::vector<fs::path> made = make_directory(directory);
    if (!made.empty()) made_ = made;
    file_ = Descriptor(
        ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    const int error = file_.is_open() && ::fstat(file_.get(), &own) == 0 ? 0 : errno;
    if (error == ENOENT) continue;
    require(error == 0 && S_ISREG(own.st_mode) && own.st_uid == ::geteuid(),
            "--checkpoint-dir {}: the lock {} {}; remove it if no other run saves there, or give "
            "another directory",
            directory.string(), path_.filename().string(),
            error == 0 ? "is not a file of this user" : "cannot be opened: " + errno_text(error));
    ::fchmod(file_.get(), 0600);
    require(::flock(file_.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK,
            "--checkpoint-dir {}: another run saves to it; wait until that has ended, or give "
            "another directory",
            directory.string());
  }
}

DirectoryLock::~DirectoryLock() {
  if (!file_.is_open()) return;
  ::unlink(path_.c_str());
  std::ranges::find_if(made_, [](const fs::path& made) { return ::rmdir(made.c_str()) != 0; });
}

// --- Removing ------------------------------------------------------------------------------------

namespace {

/// Whether a file was left by a save that did not finish.
bool is_leftover(const fs::path& file) {
  const std::string name = file.filename().string();
  if (name.ends_with(kTemporarySuffix)) return name.starts_with(fmt::format(".{}", kPrefix));
  const std::optional<CheckpointName> parsed = parse_name(name);
  if (!parsed || !belongs_to_one(*parsed)) return false;
  std::error_code error;
  return !fs::exists(checkpoint_path(file.parent_path(), parsed->steps), error) && !error;
}

}  // namespace

void remove_leftovers(const fs::path& directory) {
  std::error_code ignored;
  for (const fs::path& file : files_of(directory, ignored)) {
    if (is_leftover(file)) fs::remove(file, ignored);
  }
}

void remove_companions(const fs::path& checkpoint, const std::set<fs::path>& keep) {
  const std::optional<CheckpointName> own = parse_name(checkpoint.filename().string());
  std::error_code ignored;
  for (const fs::path& file : files_of(checkpoint.parent_path(), ignored)) {
    const std::optional<CheckpointName> name = parse_name(file.filename().string());
    const bool companion = own && name && name->steps == own->steps && belongs_to_one(*name);
    if (companion && !keep.contains(file)) remove_file(file);
  }
}

void remove_old_checkpoints(const fs::path& directory, int64_t steps, int64_t keep,
                            const std::set<int64_t>& damaged) {
  std::vector<int64_t> found = find_checkpoints(directory);
  std::erase_if(found, [&](int64_t other) { return other > steps || damaged.contains(other); });
  for (auto old = found.begin() + std::min<int64_t>(keep, std::ssize(found)); old != found.end();
       ++old) {
    const fs::path path = checkpoint_path(directory, *old);
    remove_file(path);
    remove_companions(path);
  }
}

// --- What every checkpoint is checked for --------------------------------------------------------

namespace {

constexpr const char* kOptimizerKey = "lockstep.optimizer";

/// What the names of an optimizer's state begin with.
std::string prefix_of(const std::string& state) { return state + "."; }

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
    require(found != saved.end(),
            "the optimizer that was saved: found no {}.{}, expected one; take another checkpoint",
            kStep, name);
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

}  // namespace

int64_t save_checkpoint(const fs::path& directory, const Trained& trained,
                        const TrainingState& state) {
  return write_checkpoint(directory, state_dict(trained.network), optimizer_state(trained), state);
}

int64_t write_checkpoint(const fs::path& directory, const std::vector<StateTensor>& network,
                         const std::vector<StateTensor>& optimizer, const TrainingState& state) {
  for (const auto* tensors : {&network, &optimizer}) require_finite(*tensors, state);
  make_directory(directory);
  remove_leftovers(directory);
  const fs::path path = checkpoint_path(directory, state.steps);
  Metadata texts = {{"format", "pt"}, {kTrainingKey, state.to_json()}};
  int64_t bytes = 0;
  try {
    if (!optimizer.empty()) {
      const fs::path second = optimizer_path(path);
      texts[kOptimizerKey] =
          save_safetensors(second, file_entries(optimizer), {{"format", "pt"}}, Checksums::crc32);
      bytes += int64_t(fs::file_size(second));
    }
    save_safetensors(path, file_entries(network), texts, Checksums::crc32);
  } catch (...) {
    remove_leftovers(directory);
    throw;
  }
  return bytes + int64_t(fs::file_size(path));
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
