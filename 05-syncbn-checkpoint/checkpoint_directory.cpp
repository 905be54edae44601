#include "05-syncbn-checkpoint/checkpoint_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <string_view>
#include <system_error>

#include "common/core/error.h"
#include "common/io/file.h"

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
    const std::optional<CheckpointName> name = parse_name(file.filename().string());
    if (name && name->what.empty()) found.push_back({name->steps, file});
  }
  std::ranges::sort(found, std::greater<>(), &FoundCheckpoint::steps);
  return found;
}

std::optional<FoundCheckpoint> newest_readable(
    const fs::path& directory, const std::vector<FoundCheckpoint>& found,
    const std::function<void(const fs::path&)>& read,
    const std::function<void(const std::string&)>& warn) {
  for (const FoundCheckpoint& checkpoint : found) {
    try {
      read(checkpoint.path);
      return checkpoint;
    } catch (const PeerLost&) {
      throw;
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
  std::vector<FoundCheckpoint> found = find_checkpoints(directory);
  std::erase_if(found, [&](const FoundCheckpoint& other) {
    return other.steps > steps || damaged.contains(other.steps);
  });
  for (auto old = found.begin() + std::min<int64_t>(keep, std::ssize(found)); old != found.end();
       ++old) {
    remove_file(old->path);
    remove_companions(old->path);
  }
}

}  // namespace lockstep
