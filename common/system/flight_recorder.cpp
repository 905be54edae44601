#include "common/system/flight_recorder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "common/core/error.h"
#include "common/system/descriptor.h"

namespace lockstep {
namespace {

/// An empty file of FlightPage::kBytes. A file of an earlier run is removed, not written over: its
/// readers, and a rank that still runs, keep it. A link stays, and its target is replaced.
Descriptor new_file(const std::string& name) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::path path = fs::weakly_canonical(name, error);
  if (error) path = name;
  if (fs::symlink_status(path, error).type() == fs::file_type::regular) fs::remove(path, error);
  Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666));
  const int failed =
      file.is_open() ? ::posix_fallocate(file.get(), 0, off_t{FlightPage::kBytes}) : errno;
  if (failed != 0) {
    fail<EnvironmentError>("--flight {}: {}; name another file", name, errno_text(failed));
  }
  return file;
}

}  // namespace

size_t flight_stride() {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (FlightPage::kBytes + page - 1) / page * page;
}

std::string flight_memory(int fd) {
  struct stat found = {};
  // Only what was sealed: a file could become shorter under its readers.
  const bool sealed = ::fcntl(fd, F_GET_SEALS) > 0 && ::fstat(fd, &found) == 0;
  return sealed ? fmt::format("{}:{}", fd, found.st_ino) : "";
}

FlightRecorder::FlightRecorder(int rank, int world_size, int local_rank, const std::string& file) {
  map_launchers_memory(local_rank);
  if (!file.empty()) map_file(file);
  for (const FlightPage& page : pages_) page.begin(flight_header(rank, world_size));
}

FlightRecorder::~FlightRecorder() {
  for (void* place : mapped_) ::munmap(place, FlightPage::kBytes);
}

/// Without memory there is no recording, and nothing else is wrong.
void FlightRecorder::map(int fd, size_t at) {
  void* place = ::mmap(nullptr, FlightPage::kBytes, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(at));
  if (place == MAP_FAILED) return;
  mapped_.push_back(place);
  pages_.emplace_back(place);
}

/// By now the descriptor may belong to something else, which the inode shows.
void FlightRecorder::map_launchers_memory(int local_rank) {
  const char* memory = std::getenv(kFlightMemory);
  int fd = -1;
  if (memory == nullptr || std::sscanf(memory, "%d:", &fd) != 1 || flight_memory(fd) != memory) {
    return;
  }
  struct stat found = {};
  const size_t at = size_t(local_rank) * flight_stride();
  if (::fstat(fd, &found) != 0 || size_t(found.st_size) < at + FlightPage::kBytes) return;
  map(fd, at);
}

void FlightRecorder::map_file(const std::string& file) {
  const Descriptor made = new_file(file);
  const size_t before = pages_.size();
  map(made.get(), 0);
  if (pages_.size() == before) {
    fail<EnvironmentError>("--flight {}: cannot map it: {}; name a file elsewhere", file,
                           errno_text(errno));
  }
}

void FlightRecorder::create(FlightEntry& entry) {
  entry.record = records_.fetch_add(1, kRelaxed) + 1;
  const uint64_t before = entry.record - std::min<uint64_t>(entry.record, FlightPage::kEntries);
  if (last_done_[(entry.record - 1) % FlightPage::kEntries].load(kRelaxed) == before) write(entry);
}

void FlightRecorder::write(const FlightEntry& entry) const {
  for (const FlightPage& page : pages_) page.write(entry);
}

void FlightRecorder::complete(FlightEntry& entry, int64_t duration_ns) {
  write(entry);
  set_free(entry);
  if (entry.group == 0 && entry.kind != kEndsAlone) collective_ns_.fetch_add(duration_ns, kRelaxed);
}

void FlightRecorder::give_up(const FlightEntry& entry) {
  for (const FlightPage& page : pages_) page.give_up(steady_ns());
  set_free(entry);
}

void FlightRecorder::set_free(const FlightEntry& entry) {
  last_done_[(entry.record - 1) % FlightPage::kEntries].store(entry.record, kRelaxed);
}

// --- Calls ---------------------------------------------------------------------------------------

FlightCall::FlightCall(FlightRecorder* recorder, const FlightEntry& entry)
    : recorder_(recorder), entry_(entry) {
  entry_.created_ns = steady_ns();
  if (recorder_ != nullptr) recorder_->create(entry_);
}

void FlightCall::start() {
  entry_.started_ns = steady_ns();
  if (recorder_ != nullptr) recorder_->write(entry_);
}

void FlightCall::complete(int64_t duration_ns) {
  entry_.completed_ns = steady_ns();
  if (!has_started()) entry_.started_ns = entry_.completed_ns;
  entry_.started_ns = std::min(entry_.started_ns, entry_.completed_ns - duration_ns);
  if (recorder_ != nullptr) recorder_->complete(entry_, duration_ns);
}

void FlightCall::give_up() {
  if (recorder_ != nullptr) recorder_->give_up(entry_);
}

}  // namespace lockstep
