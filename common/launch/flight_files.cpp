// Flight recordings in files, and the program that joins them: flight FILE.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>
#include <cerrno>
#include <filesystem>
#include <optional>

#include "common/core/error.h"
#include "common/launch/flight_table.h"
#include "common/system/descriptor.h"
#include "common/system/rank.h"

namespace lockstep {
namespace {

/// The words of a file; nothing if there is none of this name.
std::optional<std::vector<uint64_t>> words_of(const std::string& path) {
  // A FIFO that nobody writes to would keep an open() for ever.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.is_open() && errno == ENOENT) return {};
  struct stat found = {};
  if (!file.is_open() || ::fstat(file.get(), &found) != 0) {
    fail<BadInput>("cannot read it: {}", errno_text(errno));
  }
  require(S_ISREG(found.st_mode), "found no regular file, expected a flight recording");
  require(found.st_size == off_t{FlightPage::kBytes}, "found {} bytes, a flight recording has {}",
          found.st_size, FlightPage::kBytes);
  std::vector<uint64_t> words(FlightPage::kWords);
  const ssize_t read = ::read(file.get(), words.data(), FlightPage::kBytes);
  require(read == ssize_t{FlightPage::kBytes}, "only {} of {} bytes could be read", read,
          FlightPage::kBytes);
  return words;
}

std::optional<FlightRank> rank_in(const std::string& path) {
  std::optional<FlightRank> rank;
  within("--flight " + path, [&] {
    if (const auto words = words_of(path)) rank = FlightRank{.log = read_flight_page(*words)};
  });
  return rank;
}

}  // namespace

std::vector<FlightRank> read_flight_files(const std::string& file) {
  std::vector<FlightRank> ranks;
  uint64_t world_size = 1;
  const auto add = [&](uint64_t number) {
    const std::string path = path_of_rank(file, int(number));
    std::optional<FlightRank> rank = rank_in(path);
    if (!rank) return;
    const FlightHeader& header = rank->log.header;
    require(header.rank == number, "--flight {}: found the recording of rank {}, expected rank {}",
            path, header.rank, number);
    require(
        ranks.empty() || header.world_size == world_size,
        "--flight {}: found a rank of {}, expected one of {}, as in the other files: recordings "
        "of one job",
        path, header.world_size, world_size);
    world_size = header.world_size;
    ranks.push_back(*std::move(rank));
  };
  // Rank 0's file may be missing: any other says how many ranks there are.
  for (uint64_t number = 0; number < world_size || (ranks.empty() && number < 64); ++number) {
    add(number);
  }
  require(!ranks.empty(), "--flight {}: there is no such file, nor {}", file,
          path_of_rank(file, 1));
  return ranks;
}

}  // namespace lockstep
