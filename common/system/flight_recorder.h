#pragma once
// The flight recorder keeps a rank's last 64 calls, for readers who ask when the rank itself can no
// longer answer. A recording is in memory, or a file, that outlives the rank.
//
// The format, for readers in any language. Words of 8 bytes, of the machine that wrote them:
//
//   word 0          "LSFLIGHT"
//   word 1          version 1 | 64 << 16 (entries) | 32 << 32 (words of an entry)
//   words 2, 3, 4   rank, world size, process id
//   word 5          the wall clock minus the steady clock, ns: all other times are steady
//   words 6, 7      the host's boot id: ranks that have the same have the same steady clock
//   word 8          check of words 0 to 7
//   word 9          when an error first left a call; 0: never
//   words 10 to 17  the rank's place among the others, "data 1, tensor 1"; a 0 byte ends it, or it
//                   fills them; 0: the program has named none
//   words 18 to 63  0
//   entry e         words 64 + 32 e to 95 + 32 e: record number e + 1, or e + 65, or e + 129, ...
//     word 0          check of words 1 to 31; 0: no entry yet
//     words 1 to 31   FlightEntry, in its order; texts end with a 0 byte or fill their place
//
// The check of words w is: h = 0xcbf29ce484222325; for each w: h = (h ^ w) * 0x9e3779b97f4a7c15,
// h ^= h >> 32 (all modulo 2^64); then h | 1. An entry whose check does not fit is being written,
// or its rank died while it wrote: readers leave it out. So no order of memory is needed, and all
// words are written relaxed: a release here, which another thread could acquire, would hide from
// ThreadSanitizer that a stream does not wait for another.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/core/host.h"

namespace lockstep {

enum FlightKind : uint64_t {
  kEndsTogether = 0,  // a collective that ends on no rank before all have come
  kTransfers = 1,     // sends and receives, which are not the same on all ranks
  kEndsAlone = 2,     // a collective in which one rank waits for nobody: broadcast
};

/// One call of a rank. The names in brackets are those of PyTorch's flight recorder
/// (TORCH_NCCL_TRACE_BUFFER_SIZE).
struct FlightEntry {
  uint64_t record = 0;       // 1, 2, 3, ... over all calls of this rank [record_id]
  uint64_t number = 0;       // 1, 2, 3, ... in its group; transfers count by themselves [seq_id]
  uint64_t group = 0;        // 0: all ranks; else as ProcessGroup::new_group() [pg_id]
  uint64_t members = 0;      // whom it needs: bit r for rank r of the job; 0: too many for 64 bits
  uint64_t kind = 0;         // FlightKind [is_p2p]
  uint64_t bytes = 0;        // of the rank's own share
  int64_t created_ns = 0;    // when the host made the call [time_created_ns]
  int64_t started_ns = 0;    // when the device came to it; 0: not yet [time_discovered_started_ns]
  int64_t completed_ns = 0;  // 0: not yet [time_discovered_completed_ns]
  std::array<char, 24> name{};   // "all_reduce" [profiling_name]
  std::array<char, 48> label{};  // whom it is for, "bn1"; may be empty
  std::array<char, 104> text{};  // what must be the same on all ranks: "all_reduce of 5 f32, sum"
};

struct FlightHeader {
  uint64_t magic = 0, format = 0;
  uint64_t rank = 0, world_size = 0, process = 0;
  int64_t wall_minus_steady_ns = 0;
  std::array<uint64_t, 2> host{};  // its boot id
};

/// The result of reading a recording.
struct FlightLog {
  FlightHeader header;
  int64_t gave_up_ns = 0;            // when an error first left a call; 0: never
  std::string place;                 // "data 1, tensor 1"; may be empty
  std::vector<FlightEntry> entries;  // whole ones, by record
  int torn = 0;                      // entries that were being written
};

/// A rank's page, in memory that starts at a multiple of 8 bytes and is the caller's.
class FlightPage {
 public:
  static constexpr size_t kEntries = 64;
  static constexpr size_t kHeaderWords = 64, kEntryWords = 32;
  static constexpr size_t kWords = kHeaderWords + kEntries * kEntryWords;
  static constexpr size_t kBytes = kWords * sizeof(uint64_t);

  explicit FlightPage(void* memory) : words_(static_cast<std::atomic<uint64_t>*>(memory)) {}

  /// Begins a new recording, without entries.
  void begin(const FlightHeader& header) const;
  void write(const FlightEntry& entry) const;
  /// Writes as much of the place as fits.
  void name_place(const std::string& place) const;
  /// Notes when an error left a call; keeps only the first such time.
  void give_up(int64_t now_ns) const;

 private:
  std::atomic<uint64_t>* words_;
};

/// Copies a page that others may be writing.
std::vector<uint64_t> copy_flight_page(const void* memory);
/// Reads a copy of a page. Throws BadInput, saying what was found, if the copy is no recording.
FlightLog read_flight_page(const std::vector<uint64_t>& words);
/// Whether nobody has begun a recording here.
bool is_empty_flight_page(const std::vector<uint64_t>& words);

/// This process's header, with its host and clocks.
FlightHeader flight_header(int rank, int world_size);

/// The text of a place in an entry, on one line and without anything that a terminal would obey.
template <size_t n>
std::string flight_text(const std::array<char, n>& place) {
  std::string text;
  for (const char c : place) {
    if (c == '\0') break;
    text += c >= ' ' && c <= '~' ? c : '?';
  }
  return text;
}

/// The environment variable that names the launcher's memory: "DESCRIPTOR:INODE". In it, local rank
/// r has the page that begins at r * flight_stride().
inline constexpr const char* kFlightMemory = "LOCKSTEP_FLIGHT_MEMORY";
/// Bytes from one rank's page to the next: whole pages of memory.
size_t flight_stride();
/// The variable's value for shared memory; "" if `fd` is none.
std::string flight_memory(int fd);

/// Keeps a rank's last 64 calls in the launcher's memory, if our launcher has started this process,
/// and in a file, if one is named. Writes a call when it is made, begun and ended. Writing takes a
/// fraction of a microsecond, and orders nothing between the threads that write.
class FlightRecorder {
 public:
  /// An empty `file` is none. Throws EnvironmentError if the file cannot be written.
  FlightRecorder(int rank, int world_size, int local_rank, const std::string& file);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  /// Notes this rank's place among the others, in the program's words. Reports of the rank's end
  /// name this place, too.
  void name_place(const std::string& place) const {
    for (const FlightPage& page : pages_) page.name_place(place);
  }

  /// How long this rank was in collectives of all ranks. These end on all ranks at about the same
  /// time. So a rank with a shorter time came later, by the difference. No clock is compared.
  double seconds_in_collectives() const {
    return double(collective_ns_.load(std::memory_order_relaxed)) * 1e-9;
  }

 private:
  friend class FlightCall;
  void map(int fd, size_t at);
  void map_launchers_memory(int local_rank);
  void map_file(const std::string& file);
  /// Gives the entry its record's number. Written only once its place is free: a host that is far
  /// ahead must not write over calls that have not ended.
  void create(FlightEntry& entry);
  void write(const FlightEntry& entry) const;
  void complete(FlightEntry& entry, int64_t duration_ns);
  void give_up(const FlightEntry& entry);
  void set_free(const FlightEntry& entry);

  std::vector<void*> mapped_;
  std::vector<FlightPage> pages_;
  std::atomic<uint64_t> records_{0};
  std::array<std::atomic<uint64_t>, FlightPage::kEntries> last_done_{};  // record in each place
  std::atomic<int64_t> collective_ns_{0};
};

/// One call on its way: copied into the task that makes it, used by one thread at a time. Without a
/// recorder, the call has only a number. The recorder must outlive the call, which does not own it:
/// the count of a shared_ptr would be an order between threads, too.
class FlightCall {
 public:
  FlightCall() = default;
  /// Notes that the host makes the call.
  FlightCall(FlightRecorder* recorder, const FlightEntry& entry);

  uint64_t number() const { return entry_.number; }
  bool is_recorded() const { return recorder_ != nullptr; }
  bool has_started() const { return entry_.started_ns != 0; }
  /// Notes that the device has come to the call.
  void start();
  void complete() { complete(steady_ns() - entry_.started_ns); }
  /// For a caller that sees only later that the call began and ended, and knows how long it took.
  void complete(int64_t duration_ns);
  /// Notes that an error has ended the call: in the recording it stays a call that did not end.
  void give_up();

 private:
  FlightRecorder* recorder_ = nullptr;
  FlightEntry entry_;
};

/// Copies a text into a place of an entry, as much of it as fits.
template <size_t n>
void put_flight_text(std::array<char, n>& place, const std::string& text) {
  place = {};
  text.copy(place.data(), n);
}

}  // namespace lockstep
