#include "common/system/flight_page.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <span>

#include "common/core/error.h"

namespace lockstep {
namespace {

constexpr uint64_t kMagic =
    std::endian::native == std::endian::little ? 0x544847494C46534C : 0x4C53464C49474854;
constexpr uint64_t kFormat = 1 | FlightPage::kEntries << 16 | FlightPage::kEntryWords << 32;
constexpr size_t kHeaderCheck = 8, kGaveUp = 9;
constexpr uint64_t kMostRanks = 1 << 20;
constexpr auto kRelaxed = std::memory_order_relaxed;

using EntryWords = std::array<uint64_t, FlightPage::kEntryWords - 1>;  // behind its check
using HeaderWords = std::array<uint64_t, kHeaderCheck>;
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

// --- This process --------------------------------------------------------------------------------

int64_t steady_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
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

}  // namespace lockstep
