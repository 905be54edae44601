#pragma once
// A rank's side of the flight recorder: what it was doing, for whoever asks when it no longer can
// say it itself. Mirrors PyTorch's flight recorder in its names (flight_page.h).

#include <atomic>
#include <string>
#include <vector>

#include "common/system/flight_page.h"

namespace lockstep {

/// The environment variable that names the launcher's memory: "DESCRIPTOR:INODE". In it, local rank
/// r has the page that begins at r * flight_stride().
inline constexpr const char* kFlightMemory = "LOCKSTEP_FLIGHT_MEMORY";
/// Bytes from one rank's page to the next: whole pages of memory.
size_t flight_stride();
/// The variable's value for shared memory; "" if `fd` is none.
std::string flight_memory(int fd);

/// Keeps a rank's last 64 calls in the launcher's memory, if a launcher of ours has started this
/// process, and in a file, if one is named. A call is written when it is made, begun and ended,
/// each time in a fraction of a microsecond, and orders nothing between the threads that write.
class FlightRecorder {
 public:
  /// An empty `file` is none. Throws EnvironmentError if the file cannot be written.
  FlightRecorder(int rank, int world_size, int local_rank, const std::string& file);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  /// How long this rank was in collectives of all ranks. They end on all ranks at about the same
  /// time, so who was in them for less than others came later, by as much. No clock is compared.
  double seconds_in_collectives() const { return double(collective_ns_.load(kRelaxed)) * 1e-9; }

 private:
  friend class FlightCall;
  static constexpr auto kRelaxed = std::memory_order_relaxed;

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
/// recorder it only has a number. It does not own the recorder, which must outlive it: the count of
/// a shared_ptr would be an order between threads, too.
class FlightCall {
 public:
  FlightCall() = default;
  /// The host makes the call.
  FlightCall(FlightRecorder* recorder, const FlightEntry& entry);

  uint64_t number() const { return entry_.number; }
  bool is_recorded() const { return recorder_ != nullptr; }
  bool has_started() const { return entry_.started_ns != 0; }
  /// The device has come to it.
  void start();
  void complete() { complete(steady_ns() - entry_.started_ns); }
  /// For who only sees later that it began and ended, and knows how long it took.
  void complete(int64_t duration_ns);
  /// An error has ended it: it stays a call that did not end.
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
