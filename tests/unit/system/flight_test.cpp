// The flight recorder: what a rank leaves, what a reader takes, and what the table says of it.

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "common/core/error.h"
#include "common/launch/flight_table.h"
#include "common/system/flight_recorder.h"
#include "common/system/rank.h"
#include "common/system/shared_memory.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/process.h"

namespace lockstep {
namespace {

using namespace testing;
using Catch::Matchers::ContainsSubstring;

constexpr int64_t kLongCall = 1'000'000'000'000;  // ns: longer than this test

FlightEntry entry_of(uint64_t number, const std::string& text = "all_reduce of 5 f32, sum") {
  FlightEntry entry{.number = number};
  put_flight_text(entry.text, text);
  put_flight_text(entry.name, text.substr(0, text.find(' ')));
  return entry;
}

void run(FlightCall call) {
  call.start();
  call.complete();
}

std::vector<uint64_t> numbers_in(const std::string& file) {
  std::vector<uint64_t> numbers;
  const FlightLog log = read_flight_files(file).at(0).log;
  for (const FlightEntry& entry : log.entries) numbers.push_back(entry.number);
  return numbers;
}

std::vector<uint64_t> from_to(uint64_t first, uint64_t last) {
  std::vector<uint64_t> numbers;
  for (uint64_t number = first; number <= last; ++number) numbers.push_back(number);
  return numbers;
}

// --- What a rank leaves --------------------------------------------------------------------------

TEST_CASE("A rank keeps its last 64 calls, with when they were made, begun and ended", "[flight]") {
  const TempDir folder;
  const std::string file = folder / "flight";
  const auto recorder = std::make_shared<FlightRecorder>(0, 2, 0, file);
  CHECK(numbers_in(file).empty());
  for (uint64_t number = 1; number <= 100; ++number) {
    FlightCall call(recorder.get(), entry_of(number));
    if (number == 100) break;
    call.start();
    CHECK(numbers_in(file).back() == number);
    call.complete();
  }
  const FlightLog log = read_flight_files(file).at(0).log;
  CHECK(numbers_in(file) == from_to(37, 100));
  CHECK((log.torn == 0 && log.gave_up_ns == 0));
  CHECK((log.header.rank == 0 && log.header.world_size == 2));
  CHECK((log.header.host[0] != 0 || log.header.host[1] != 0));
  int64_t before = 0;
  for (const FlightEntry& entry : log.entries) {
    CHECK(entry.created_ns >= before);
    before = entry.created_ns;
    CHECK((entry.started_ns >= entry.created_ns) == (entry.number != 100));
    CHECK((entry.completed_ns >= entry.started_ns && entry.completed_ns > 0) ==
          (entry.number != 100));
  }
  CHECK(flight_text(log.entries[0].text) == "all_reduce of 5 f32, sum");
}

TEST_CASE("A host that is far ahead writes over no call that has not ended", "[flight]") {
  const TempDir folder;
  const std::string file = folder / "flight";
  const auto recorder = std::make_shared<FlightRecorder>(0, 1, 0, file);
  std::vector<FlightCall> calls;
  for (uint64_t number = 1; number <= 100; ++number)
    calls.emplace_back(recorder.get(), entry_of(number));
  CHECK(numbers_in(file) == from_to(1, 64));
  for (size_t i = 0; i < 70; ++i) run(calls[i]);
  CHECK(numbers_in(file) == from_to(7, 70));
  for (size_t i = 70; i < 100; ++i) run(calls[i]);
  CHECK(numbers_in(file) == from_to(37, 100));
}

TEST_CASE("A call that an error ends stays one that has not ended", "[flight]") {
  const TempDir folder;
  const auto recorder = std::make_shared<FlightRecorder>(0, 1, 0, folder / "flight");
  FlightCall call(recorder.get(), entry_of(1));
  call.start(), call.give_up();
  const FlightLog log = read_flight_files(folder / "flight").at(0).log;
  CHECK(log.entries.at(0).completed_ns == 0);
  CHECK(log.gave_up_ns >= log.entries.at(0).started_ns);
  FlightCall later(recorder.get(), entry_of(2));
  later.start(), later.give_up();
  CHECK(read_flight_files(folder / "flight").at(0).log.gave_up_ns == log.gave_up_ns);  // the first
}

TEST_CASE("A call that a device has timed began so long before its end", "[flight]") {
  const TempDir folder;
  const auto recorder = std::make_shared<FlightRecorder>(0, 1, 0, folder / "flight");
  for (const bool seen : {false, true}) {
    FlightCall call(recorder.get(), entry_of(1));
    if (seen) call.start();
    call.complete(kLongCall);
    const FlightEntry entry = read_flight_files(folder / "flight").at(0).log.entries.back();
    CHECK(entry.completed_ns - entry.started_ns == kLongCall);
  }
}

TEST_CASE("Only collectives of all ranks in which all wait count as waiting", "[flight]") {
  FlightEntry part = entry_of(1), alone = entry_of(1);
  part.group = 1, alone.kind = kEndsAlone;
  const auto recorder = std::make_shared<FlightRecorder>(0, 1, 0, "");
  for (const FlightEntry& entry : {part, alone}) {
    FlightCall call(recorder.get(), entry);
    call.complete(1000000000);
  }
  CHECK(recorder->seconds_in_collectives() == 0);
  FlightCall(recorder.get(), entry_of(1)).complete(1500000000);
  CHECK(recorder->seconds_in_collectives() == 1.5);
}

TEST_CASE("A recording replaces a file, follows a link, and writes into the launcher's memory",
          "[flight]") {
  const TempDir folder;
  const std::string target = folder / "target", link = folder / "link";
  write_file(target, "an earlier run's");
  std::filesystem::create_symlink("target", link);
  const SharedMemory memory = SharedMemory::create(2 * flight_stride());
  const ScopedEnvironment told(kFlightMemory, flight_memory(memory.descriptor().get()));
  const auto recorder = std::make_shared<FlightRecorder>(1, 2, 1, link);
  run({recorder.get(), entry_of(7)});
  CHECK(std::filesystem::is_symlink(link));
  CHECK(read_text(target).size() == FlightPage::kBytes);
  CHECK(is_empty_flight_page(copy_flight_page(memory.data())));
  const auto words = copy_flight_page(memory.data() + flight_stride());
  CHECK(read_flight_page(words).entries.at(0).number == 7);
  CHECK(read_flight_page(words).header.rank == 1);
}

TEST_CASE("Memory that is not the launcher's, or too small, is left alone", "[flight]") {
  const TempDir folder;
  const SharedMemory memory = SharedMemory::create(flight_stride());
  const std::string right = flight_memory(memory.descriptor().get());
  CHECK(flight_memory(0).empty());
  for (const std::string& told : {right + "1", std::string("0:1"), std::string("x"), right}) {
    const ScopedEnvironment environment(kFlightMemory, told);
    const FlightRecorder recorder(1, 2, 1, "");  // whose page would lie after the end
    CHECK(is_empty_flight_page(copy_flight_page(memory.data())));
  }
  CHECK_THAT(message_of<EnvironmentError>([&] { FlightRecorder(0, 1, 0, folder / "none/flight"); }),
             ContainsSubstring("--flight ") && ContainsSubstring("No such file"));
}

// --- What a reader takes -------------------------------------------------------------------------

void flip(const std::string& file, size_t word) {
  std::string bytes = read_text(file);
  bytes[8 * word] = char(bytes[8 * word] ^ 1);
  write_file(file, bytes);
}

TEST_CASE("A torn entry is left out, and nothing else", "[flight]") {
  const TempDir folder;
  const std::string file = folder / "flight";
  {
    const auto recorder = std::make_shared<FlightRecorder>(0, 1, 0, file);
    for (uint64_t number = 1; number <= 3; ++number) {
      run({recorder.get(), entry_of(number)});
    }
  }
  const size_t second = FlightPage::kHeaderWords + FlightPage::kEntryWords;
  for (size_t word = second; word < second + FlightPage::kEntryWords; ++word) {
    INFO(word - second);
    flip(file, word);
    CHECK(numbers_in(file) == std::vector<uint64_t>{1, 3});
    CHECK(read_flight_files(file).at(0).log.torn == 1);
    flip(file, word);
  }
  CHECK(numbers_in(file) == from_to(1, 3));
}

TEST_CASE("What is no recording is refused in one line", "[flight]") {
  const TempDir folder;
  const std::string file = folder / "flight";
  const auto refusal = [&] { return message_of<BadInput>([&] { read_flight_files(file); }); };
  CHECK_THAT(refusal(), ContainsSubstring("there is no such file"));
  const auto page = [&] {
    std::filesystem::remove(file);
    const FlightRecorder recorder(0, 2, 0, file);
    return read_text(file);
  };
  const std::string whole = page();
  const std::map<std::string, std::string> hostile{
      {"", "found 0 bytes"},
      {whole.substr(1), "found 16895 bytes"},
      {whole + "x", "found 16897 bytes"},
      {"X" + whole.substr(1), "does not begin with LSFLIGHT"},
      {std::string(whole.size(), '\0'), "does not begin with LSFLIGHT"},
      {whole.substr(0, 8) + "X" + whole.substr(9), "of another form"},
      {whole.substr(0, 16) + "\1" + whole.substr(17), "a damaged flight recording"}};
  for (const auto& [bytes, told] : hostile) {
    write_file(file, bytes);
    CHECK_THAT(refusal(), ContainsSubstring("--flight " + file + ": ") && ContainsSubstring(told));
    CHECK_THAT(refusal(), !ContainsSubstring("\n"));
  }
  std::filesystem::remove(file);
  REQUIRE(::mkfifo(file.c_str(), 0600) == 0);
  CHECK_THAT(refusal(), ContainsSubstring("no regular file"));
  page();
  FlightRecorder(1, 3, 0, path_of_rank(file, 1));  // leaves its file
  CHECK_THAT(refusal(), ContainsSubstring("found a rank of 3, expected one of 2"));
  std::filesystem::remove(path_of_rank(file, 1));
  FlightRecorder(0, 2, 0, path_of_rank(file, 1));
  CHECK_THAT(refusal(), ContainsSubstring("found the recording of rank 0, expected rank 1"));
}

TEST_CASE("Recordings are read without rank 0's, too", "[flight]") {
  const TempDir folder;
  const std::string file = folder / "flight";
  FlightRecorder(5, 8, 0, path_of_rank(file, 5));  // leaves its file
  const std::vector<FlightRank> ranks = read_flight_files(file);
  REQUIRE(ranks.size() == 1);
  CHECK(ranks[0].log.header.rank == 5);
}

TEST_CASE("A recording has the rank's place among the others, as much of it as fits", "[flight]") {
  const TempDir folder;
  const std::string file = folder / "flight";
  const auto place = [&] { return read_flight_files(file).at(0).log.place; };
  FlightRecorder recorder(0, 4, 0, file);
  CHECK(place().empty());
  recorder.name_place("data 1, tensor 1");
  CHECK(place() == "data 1, tensor 1");
  recorder.name_place(std::string(100, 'x'));
  CHECK(place() == std::string(64, 'x'));
}

TEST_CASE("Texts of a recording reach the reader without what a terminal would obey", "[flight]") {
  std::array<char, 24> place{};
  put_flight_text(place, "a\033[2J\nb");
  CHECK(flight_text(place) == "a?[2J?b");
  put_flight_text(place, std::string(100, 'x'));
  CHECK(flight_text(place) == std::string(24, 'x'));
}

}  // namespace
}  // namespace lockstep
