#include "common/system/flight_recorder.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <span>

#include "common/core/error.h"
#include "common/system/descriptor.h"

namespace lockstep {

// --- A page --------------------------------------------------------------------------------------

namespace {

constexpr uint64_t kMagic =
    std::endian::native == std::endian::little ? 0x544847494C46534C : 0x4C53464C49474854;
constexpr uint64_t kFormat = 1 | FlightPage::kEntries << 16 | FlightPage::kEntryWords << 32;
constexpr size_t kHeaderCheck = 8, kGaveUp = 9, kPlace = 10, kPlaceWords = 8;
constexpr uint64_t kMostRanks = 1 << 20;
constexpr auto kRelaxed = std::memory_order_relaxed;

using EntryWords = std::array<uint64_t, FlightPage::kEntryWords - 1>;  // after its check
using HeaderWords = std::array<uint64_t, kHeaderCheck>;
using PlaceText = std::array<char, kPlaceWords * sizeof(uint64_t)>;
static_assert(sizeof(FlightEntry) == sizeof(EntryWords));
static_assert(sizeof(FlightHeader) == sizeof(HeaderWords));

uint64_t check_of(std::span<const uint64_t> words) {
  uint64_t check = 0xcbf29ce484222325;
  for (const uint64_t word : words) {
    check = (check ^ word) * 0x9e3779b97f4a7c15;
    check ^= check >> 32;
  }
  return check | 1;
}

size_t place_of(uint64_t record) {
  return FlightPage::kHeaderWords + (record - 1) % FlightPage::kEntries * FlightPage::kEntryWords;
}

}  // namespace

void FlightPage::begin(const FlightHeader& header) const {
  for (size_t i = 0; i < kWords; ++i) words_[i].store(0, kRelaxed);
  const auto words = std::bit_cast<HeaderWords>(header);
  for (size_t i = 0; i < words.size(); ++i) words_[i].store(words[i], kRelaxed);
  words_[kHeaderCheck].store(check_of(words), kRelaxed);
}

void FlightPage::write(const FlightEntry& entry) const {
  const auto words = std::bit_cast<EntryWords>(entry);
  std::atomic<uint64_t>* const place = words_ + place_of(entry.record);
  for (size_t i = 0; i < words.size(); ++i) place[1 + i].store(words[i], kRelaxed);
  place[0].store(check_of(words), kRelaxed);
}

void FlightPage::name_place(const std::string& place) const {
  PlaceText text{};
  put_flight_text(text, place);
  const auto words = std::bit_cast<std::array<uint64_t, kPlaceWords>>(text);
  for (size_t i = 0; i < kPlaceWords; ++i) words_[kPlace + i].store(words[i], kRelaxed);
}

void FlightPage::give_up(int64_t now_ns) const {
  uint64_t never = 0;
  words_[kGaveUp].compare_exchange_strong(never, static_cast<uint64_t>(now_ns), kRelaxed);
}

// --- Reading -------------------------------------------------------------------------------------

std::vector<uint64_t> copy_flight_page(const void* memory) {
  const auto* const from = static_cast<const std::atomic<uint64_t>*>(memory);
  std::vector<uint64_t> words(FlightPage::kWords);
  for (size_t i = 0; i < words.size(); ++i) words[i] = from[i].load(kRelaxed);
  return words;
}

bool is_empty_flight_page(const std::vector<uint64_t>& words) { return words.at(0) == 0; }

FlightLog read_flight_page(const std::vector<uint64_t>& words) {
  require(words.size() == FlightPage::kWords, "found {} bytes, a flight recording has {}",
          words.size() * sizeof(uint64_t), FlightPage::kBytes);
  require(words[0] == kMagic, "found no flight recording: it does not begin with LSFLIGHT");
  require(words[1] == kFormat, "a flight recording of another form: found {:#x}, expected {:#x}",
          words[1], kFormat);
  FlightLog log;
  HeaderWords header;
  std::copy_n(words.begin(), header.size(), header.begin());
  log.header = std::bit_cast<FlightHeader>(header);
  require(words[kHeaderCheck] == check_of(header) && log.header.world_size <= kMostRanks &&
              log.header.rank < log.header.world_size,
          "a damaged flight recording: its header does not fit its check");
  log.gave_up_ns = static_cast<int64_t>(words[kGaveUp]);
  std::array<uint64_t, kPlaceWords> place;
  std::copy_n(words.begin() + kPlace, kPlaceWords, place.begin());
  log.place = flight_text(std::bit_cast<PlaceText>(place));
  for (size_t i = 0; i < FlightPage::kEntries; ++i) {
    const size_t at = FlightPage::kHeaderWords + i * FlightPage::kEntryWords;
    EntryWords entry;
    std::copy_n(words.begin() + ptrdiff_t(at + 1), entry.size(), entry.begin());
    const auto found = std::bit_cast<FlightEntry>(entry);
    const bool whole =
        words[at] == check_of(entry) && found.record > 0 && place_of(found.record) == at;
    if (whole) log.entries.push_back(found);
    const bool unused = std::ranges::all_of(entry, [](uint64_t word) { return word == 0; });
    if (!whole && !unused) ++log.torn;
  }
  std::ranges::sort(log.entries, {}, &FlightEntry::record);
  return log;
}

FlightHeader flight_header(int rank, int world_size) {
  const int64_t wall =
      std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
  FlightHeader header{.magic = kMagic,
                      .format = kFormat,
                      .rank = uint64_t(rank),
                      .world_size = uint64_t(world_size),
                      .process = uint64_t(::getpid()),
                      .wall_minus_steady_ns = wall - steady_ns()};
  if (std::FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re")) {
    std::array<char, 37> id{};  // 8-4-4-4-12 hexadecimal digits
    if (std::fgets(id.data(), id.size(), file) != nullptr) {
      std::array<char, 33> digits{};
      std::copy_if(id.begin(), id.end() - 1, digits.begin(), [](char c) { return c != '-'; });
      std::sscanf(digits.data(), "%16lx%16lx", &header.host[0], &header.host[1]);
    }
    std::fclose(file);
  }
  return header;
}

// --- The recorder --------------------------------------------------------------------------------

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
