#include "common/launch/flight_table.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <map>
#include <set>
#include <utility>

#include "common/core/error.h"
#include "common/core/host.h"
#include "common/core/text.h"
#include "common/system/descriptor.h"
#include "common/system/flight_recorder.h"
#include "common/system/rank.h"

namespace lockstep {
namespace {

// --- Where each rank is --------------------------------------------------------------------------

/// Where a rank is.
struct FlightState {
  enum class Is { waiting, enqueued, past, idle };  // in a call; not yet begun; after one; no call
  Is is = Is::idle;
  FlightEntry call{};         // that one
  int64_t since_ns = 0;       // on the clock of the first rank; 0: never
  std::set<int> waits_for{};  // ranks that have not come to the call it is in
};

/// Two ranks that made different calls at one place.
struct FlightDifference {
  FlightEntry one{}, other{};
  int rank = 0, other_rank = 0;
};

using Is = FlightState::Is;

void shift(FlightLog& log, int64_t ns) {
  const auto move = [&](int64_t& time) { time += time != 0 ? ns : 0; };
  for (FlightEntry& entry : log.entries) {
    move(entry.created_ns), move(entry.started_ns), move(entry.completed_ns);
  }
  move(log.gave_up_ns);
}

int64_t last_time(const FlightLog& log) {
  int64_t last = log.gave_up_ns;
  for (const FlightEntry& entry : log.entries) {
    last = std::max({last, entry.created_ns, entry.started_ns, entry.completed_ns});
  }
  return last;
}

bool same_call(const FlightEntry& a, const FlightEntry& b) {
  return a.text == b.text && a.label == b.label;
}

/// Whom a call needs, as far as that fits into 64 bits; of a call of all ranks always.
std::set<int> members_of(const FlightEntry& call, int world_size) {
  std::set<int> members;
  for (int rank = 0; rank < world_size; ++rank) {
    const bool all = call.group == 0 && call.kind != kTransfers;
    if (all || (rank < 64 && (call.members >> rank & 1) == 1)) members.insert(rank);
  }
  return members;
}

class FlightJob {
 public:
  FlightJob(const std::vector<FlightRank>& ranks, int64_t now_ns) : now_ns_(now_ns) {
    for (const FlightRank& rank : ranks) {
      world_size_ = std::max(world_size_, static_cast<int>(rank.log.header.world_size));
      FlightLog& log = logs_[static_cast<int>(rank.log.header.rank)] = rank.log;
      const std::optional<int64_t> ns = correction(log, ranks.front().log);
      if (ns) shift(log, *ns);
      one_clock_ = one_clock_ && ns;
    }
    for (const auto& [rank, log] : logs_) {
      if (now_ns == 0) now_ns_ = std::max(now_ns_, last_time(log));
      states_[rank] = state_of(log);
    }
    for (auto& [rank, state] : states_) {
      if (state.is == Is::waiting) state.waits_for = missing(rank, state.call);
    }
  }

  int world_size() const { return world_size_; }
  const std::map<int, FlightState>& states() const { return states_; }
  int64_t now_ns() const { return now_ns_; }
  /// Whether all ranks' times are on one clock; and, if that took a correction, by how many calls.
  bool one_clock() const { return one_clock_; }
  size_t aligned_by() const { return aligned_by_; }
  /// The first of the ranks' differing calls, if any differ.
  std::optional<FlightDifference> difference() const {
    std::map<Place, std::pair<int, FlightEntry>> first;
    std::optional<FlightDifference> found;
    for (const auto& [rank, log] : logs_) {
      for (const FlightEntry& entry : log.entries) {
        if (entry.kind == kTransfers) continue;
        const auto [place, is_new] =
            first.try_emplace({entry.group, entry.number}, std::pair(rank, entry));
        const auto& [other_rank, other] = place->second;
        if (is_new || same_call(other, entry)) continue;
        if (found && found->other.created_ns <= entry.created_ns) continue;
        found = FlightDifference{other, entry, other_rank, rank};
      }
    }
    return found;
  }

  /// The rank that gave up first.
  std::optional<int> first_to_give_up() const {
    std::optional<int> first;
    for (const auto& [rank, log] : logs_) {
      if (log.gave_up_ns == 0) continue;
      if (!first || log.gave_up_ns < logs_.at(*first).gave_up_ns) first = rank;
    }
    return first;
  }

  /// The ranks that are in a call and have not given it up, where others have.
  std::set<int> silent() const {
    std::set<int> found;
    for (const auto& [rank, log] : logs_) {
      const bool waits = states_.at(rank).is == Is::waiting;
      if (waits && log.gave_up_ns == 0 && first_to_give_up()) found.insert(rank);
    }
    return found;
  }

 private:
  using Place = std::pair<uint64_t, uint64_t>;  // group and number
  /// ns to add to a rank's times; nothing: its clock cannot be compared. A call that ends together
  /// ends on all hosts at about the same moment: what the clocks say then is how far they are
  /// apart. The median of all such calls leaves out the odd one.
  std::optional<int64_t> correction(const FlightLog& log, const FlightLog& reference) {
    if (log.header.host == reference.header.host) return 0;
    std::map<Place, int64_t> ends;
    const auto ended = [](const FlightEntry& entry) {
      return entry.kind == kEndsTogether && entry.group == 0 && entry.completed_ns != 0;
    };
    for (const FlightEntry& entry : reference.entries) {
      if (ended(entry)) ends[{entry.group, entry.number}] = entry.completed_ns;
    }
    std::vector<int64_t> apart;
    for (const FlightEntry& entry : log.entries) {
      const auto other = ends.find({entry.group, entry.number});
      if (ended(entry) && other != ends.end()) apart.push_back(other->second - entry.completed_ns);
    }
    if (apart.empty()) return {};
    aligned_by_ = aligned_by_ == 0 ? apart.size() : std::min(aligned_by_, apart.size());
    const auto middle = apart.begin() + std::ptrdiff_t(apart.size() / 2);
    std::ranges::nth_element(apart, middle);
    return *middle;
  }

  FlightState state_of(const FlightLog& log) const {
    const auto& calls = log.entries;  // by record
    const auto waiting = std::find_if(calls.rbegin(), calls.rend(), [](const FlightEntry& entry) {
      return entry.started_ns != 0 && entry.completed_ns == 0;
    });
    if (waiting != calls.rend()) return {Is::waiting, *waiting, waiting->started_ns};
    const auto queued = std::ranges::find(calls, 0, &FlightEntry::started_ns);
    if (queued != calls.end()) return {Is::enqueued, *queued, queued->created_ns};
    if (!calls.empty()) return {Is::past, calls.back(), calls.back().completed_ns};
    return {};
  }

  std::set<int> missing(int rank, const FlightEntry& call) const {
    std::set<int> absent = members_of(call, world_size_);
    absent.erase(rank);
    std::erase_if(absent, [&](int other) { return has_come(other, call, rank); });
    return absent;
  }

  /// Whether `rank` has begun the call in which `waiting` waits. A transfer's numbers differ from
  /// rank to rank: its peer has come if it is in a transfer with the rank that waits.
  bool has_come(int rank, const FlightEntry& call, int waiting) const {
    const auto log = logs_.find(rank);
    if (log == logs_.end()) return false;
    if (call.kind == kTransfers) {
      const FlightState& state = states_.at(rank);
      return state.is == Is::waiting && state.call.kind == kTransfers &&
             members_of(state.call, world_size_).contains(waiting);
    }
    return std::ranges::any_of(log->second.entries, [&](const FlightEntry& entry) {
      return entry.group == call.group && entry.kind != kTransfers && entry.number >= call.number &&
             entry.started_ns != 0;
    });
  }

  int world_size_ = 0;
  std::map<int, FlightLog> logs_;  // times on one clock
  std::map<int, FlightState> states_;
  int64_t now_ns_;
  bool one_clock_ = true;
  size_t aligned_by_ = 0;
};

// --- The same in words ---------------------------------------------------------------------------

/// "rank 1", "ranks 1, 2".
std::string ranks_text(const std::set<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", listed(ranks));
}

class FlightWords {
 public:
  /// `ranks` and `job` must outlive it.
  FlightWords(const std::vector<FlightRank>& ranks, const FlightJob& job)
      : ranks_(ranks), job_(job) {}

  /// How long ago: "10.02 s"; "-" where that cannot be said.
  std::string since(int64_t ns) const {
    if (ns == 0 || !job_.one_clock()) return "-";
    return fmt::format("{:.2f} s", double(std::max<int64_t>(job_.now_ns() - ns, 0)) * 1e-9);
  }

  /// "all_reduce of 5 f32, sum, group of ranks 1, 2", "receive of 5 f32 from rank 0, in a group:
  /// rank 1 of the job"
  std::string call_text(const FlightEntry& call) const {
    const std::string text = flight_text(call.text);
    if (call.group == 0) return text;
    const std::set<int> members = members_of(call, job_.world_size());
    if (members.empty()) return text + ", group of some ranks";
    if (call.kind != kTransfers) return fmt::format("{}, group of {}", text, ranks_text(members));
    return fmt::format("{}, in a group: {} of the job", text, ranks_text(members));
  }

  /// How a rank ended; empty if it has not.
  std::string end_of(int rank) const {
    const FlightRank* const found = recording_of(rank);
    return found == nullptr ? "" : found->end;
  }

  /// "rank 3 (data 1, tensor 1)", or "rank 3" where it has no other name.
  std::string name_of(int rank) const {
    const FlightRank* const found = recording_of(rank);
    return name_rank(rank, found == nullptr ? "" : found->log.place);
  }

  /// Who is the cause, who was blamed without being it, and what about the clocks.
  std::vector<std::string> sentences() const {
    if (const auto difference = job_.difference()) {
      return {about_difference(*difference), about_clocks()};
    }
    const std::set<int> broken = failed(), behind = late();
    std::string cause = about_nobody();
    if (!broken.empty()) {
      cause = about_failed(broken);
    } else if (!behind.empty()) {
      cause = about_late(behind);
    }
    return {cause, about_reporter(broken.empty() ? behind : broken), about_clocks()};
  }

 private:
  /// Null: it left none.
  const FlightRank* recording_of(int rank) const {
    const auto found = std::ranges::find(
        ranks_, uint64_t(rank), [](const FlightRank& known) { return known.log.header.rank; });
    return found == ranks_.end() ? nullptr : &*found;
  }

  /// "13:54:16.120 (10.02 s)", by the clock of the first rank's host.
  std::string moment(int64_t ns) const {
    const int64_t wall_ms = (ns + ranks_.front().log.header.wall_minus_steady_ns) / 1000000;
    const auto seconds = static_cast<std::time_t>(wall_ms / 1000);
    tm local{};
    ::localtime_r(&seconds, &local);
    std::array<char, 16> text{};
    std::strftime(text.data(), text.size(), "%H:%M:%S", &local);
    return fmt::format("{}.{:03} ({})", text.data(), wall_ms % 1000, since(ns));
  }

  /// "call 18 (all_reduce of 5 f32, sum)"
  std::string place_text(const FlightEntry& call) const {
    return fmt::format("{} {} ({})", call.kind == kTransfers ? "transfer" : "call", call.number,
                       call_text(call));
  }

  std::set<int> failed() const {
    std::set<int> found;
    for (const FlightRank& rank : ranks_) {
      if (rank.failed) found.insert(static_cast<int>(rank.log.header.rank));
    }
    return found;
  }

  /// The ranks for which others wait, and which wait for nobody themselves.
  std::set<int> late() const {
    std::set<int> found;
    for (const auto& [rank, state] : job_.states())
      found.insert(state.waits_for.begin(), state.waits_for.end());
    std::erase_if(found, [&](int rank) {
      const auto state = job_.states().find(rank);
      return state != job_.states().end() && !state->second.waits_for.empty();
    });
    return found;
  }

  std::string about_failed(const std::set<int>& ranks) const {
    std::string text;
    for (const int rank : ranks) {
      const FlightState& state = job_.states().at(rank);
      const char* where = state.is == Is::waiting    ? ", in "
                          : state.is == Is::enqueued ? ", before "
                                                     : ", after ";
      text += fmt::format(
          "{}{} {}{}", text.empty() ? "" : "; ", name_of(rank), end_of(rank),
          state.is == Is::idle ? ", before its first call" : where + place_text(state.call));
    }
    return text;
  }

  /// The earliest of those who wait for one of `ranks`, in its call.
  std::string about_late(const std::set<int>& ranks) const {
    std::set<int> waiting;
    const FlightState* first = nullptr;
    for (const auto& [rank, state] : job_.states()) {
      const bool for_them =
          std::ranges::any_of(state.waits_for, [&](int other) { return ranks.contains(other); });
      if (!for_them) continue;
      waiting.insert(rank);
      if (first == nullptr || state.since_ns < first->since_ns) first = &state;
    }
    const bool one = waiting.size() == 1;
    return fmt::format(
        "{} late: {} {} waited in {}{}{}", ranks_text(ranks) + (ranks.size() == 1 ? " is" : " are"),
        ranks_text(waiting), one ? "has" : "have", place_text(first->call),
        job_.one_clock() ? " since " + moment(first->since_ns) : "", doing_of(ranks));
  }

  /// What the first of them is doing instead.
  std::string doing_of(const std::set<int>& ranks) const {
    const int rank = *ranks.begin();
    const auto state = job_.states().find(rank);
    const std::string who = fmt::format("; {} ", name_of(rank));
    if (state == job_.states().end()) return who + "left no recording here";
    if (!end_of(rank).empty()) return who + end_of(rank);
    switch (state->second.is) {
      case Is::enqueued:
        return who + "has made that call, but its device still does what comes before";
      case Is::waiting:
        return who + "is in " + place_text(state->second.call);
      case Is::past:
        return who + "has not made that call: look at what its host does after " +
               place_text(state->second.call);
      case Is::idle:
        break;
    }
    return who + "has made no call yet";
  }

  /// Who gave up first, and for whom it waited.
  std::string about_reporter(const std::set<int>& causes) const {
    const std::optional<int> reporter = job_.first_to_give_up();
    if (!reporter || causes.contains(*reporter)) return "";
    std::string chain;
    std::set<int> seen;
    for (int rank = *reporter; seen.insert(rank).second && job_.states().contains(rank);) {
      const std::set<int>& next = job_.states().at(rank).waits_for;
      if (next.empty()) break;
      const auto cause =
          std::ranges::find_if(next, [&](int other) { return causes.contains(other); });
      rank = cause != next.end() ? *cause : *next.begin();
      chain += fmt::format("{} waited for rank {}", chain.empty() ? "it" : ", which", rank);
    }
    if (chain.empty()) return "";
    return fmt::format("rank {}, which gave up first, is not the cause: {}", *reporter, chain);
  }

  std::string about_nobody() const {
    std::set<int> circle;
    for (const auto& [rank, state] : job_.states()) {
      if (!state.waits_for.empty()) circle.insert(rank);
    }
    if (!circle.empty()) {
      return fmt::format(
          "{} wait for each other: different groups' calls, or transfers, in another order",
          ranks_text(circle));
    }
    const std::set<int> silent = job_.silent();
    if (!silent.empty()) {
      return fmt::format(
          "nobody is late, but {} did not give up as the others did: stopped, killed, or stuck "
          "in {}",
          ranks_text(silent), place_text(job_.states().at(*silent.begin()).call));
    }
    const bool all_wait = std::ranges::all_of(
        job_.states(), [](const auto& state) { return state.second.is == Is::waiting; });
    return all_wait
               ? "nobody is late: all ranks have come to their call; look at what connects them"
               : "nobody is late: no rank waited for another";
  }

  std::string about_difference(const FlightDifference& difference) const {
    return fmt::format(
        "the calls differ: call {} is {} on rank {}, and {} on rank {}; all ranks must make the "
        "same calls in the same order",
        difference.one.number, call_text(difference.one), difference.rank,
        call_text(difference.other), difference.other_rank);
  }

  std::string about_clocks() const {
    if (!job_.one_clock()) {
      return "no times: the ranks' hosts have different clocks, and ended no call together";
    }
    if (job_.aligned_by() == 0) return "";
    return fmt::format("times of several hosts, put on one clock by the ends of {} calls",
                       job_.aligned_by());
  }

  const std::vector<FlightRank>& ranks_;
  const FlightJob& job_;
};

// --- The table -----------------------------------------------------------------------------------

constexpr size_t kMostRows = 6;

/// Ranks that are at one place.
struct Row {
  std::set<int> ranks;
  std::string call, is, what;
  int64_t since_ns = 0;  // the earliest of them
  bool waits = false;
};

std::vector<Row> rows_of(const FlightJob& job, const FlightWords& words) {
  std::vector<Row> rows;
  for (const auto& [rank, state] : job.states()) {
    const char* is = state.is == Is::waiting    ? "in it"
                     : state.is == Is::enqueued ? "made, not begun"
                     : state.is == Is::past     ? "ended, none since"
                                                : "no call yet";
    Row row{{rank}, "-", is, "", state.since_ns, state.is == Is::waiting};
    if (state.is != Is::idle) {
      row.call = fmt::format("{}", state.call.number);
      row.what = words.call_text(state.call);
    }
    if (!words.end_of(rank).empty())
      row.what += (row.what.empty() ? "[" : " [") + words.end_of(rank) + "]";
    const auto same = std::ranges::find_if(rows, [&](const Row& other) {
      return other.call == row.call && other.is == row.is && other.what == row.what;
    });
    if (same == rows.end()) {
      rows.push_back(row);
    } else {
      same->ranks.insert(rank);
      same->since_ns = std::min(same->since_ns, row.since_ns);
    }
  }
  if (rows.size() > kMostRows) {
    std::stable_partition(rows.begin(), rows.end(), [](const Row& row) { return !row.waits; });
  }
  return rows;
}

std::vector<std::string> lines_of(const std::vector<FlightRank>& ranks, const FlightJob& job) {
  const FlightWords words(ranks, job);
  const std::vector<Row> all = rows_of(job, words);
  std::vector<std::string> lines{
      fmt::format("flight recorder: the last call of each rank ({} of {} ranks)", ranks.size(),
                  job.world_size())};
  const auto add = [&](const std::string& who, const std::string& call, const std::string& is,
                       const std::string& since, const std::string& what) {
    lines.push_back(fmt::format("  {:<7} {:<5} {:<18} {:<9} {}", who, call, is, since, what));
  };
  add("rank", "call", "it is", "for", "what");
  for (size_t i = 0; i < std::min(all.size(), kMostRows); ++i) {
    add(listed(all[i].ranks), all[i].call, all[i].is, words.since(all[i].since_ns), all[i].what);
  }
  if (all.size() > kMostRows) {
    lines.push_back(fmt::format("  ... and {} more rows", all.size() - kMostRows));
  }
  for (const std::string& sentence : words.sentences()) {
    if (!sentence.empty()) lines.push_back("  " + sentence);
  }
  return lines;
}

}  // namespace

std::vector<std::string> flight_table(std::vector<FlightRank> ranks, int64_t now_ns) {
  const auto has_calls = [](const FlightRank& rank) { return !rank.log.entries.empty(); };
  if (!std::ranges::any_of(ranks, has_calls)) return {};
  std::ranges::sort(ranks, {}, [](const FlightRank& rank) { return rank.log.header.rank; });
  return lines_of(ranks, FlightJob(ranks, now_ns));
}

// --- Where the recordings come from --------------------------------------------------------------

FlightMemory::FlightMemory(int first_rank, int ranks) : first_rank_(first_rank), ranks_(ranks) {
  try {
    memory_.emplace(SharedMemory::create(size_t(ranks) * flight_stride()));
  } catch (const EnvironmentError&) {  // then no rank can leave anything
  }
}

/// What the rank of that place in the memory has left; nothing if it left nothing that can be read.
std::optional<FlightLog> FlightMemory::log_of(int local) const {
  if (!memory_) return {};
  const auto words = copy_flight_page(memory_->data() + size_t(local) * flight_stride());
  if (is_empty_flight_page(words)) return {};  // a program without a process group, or not yet
  try {
    FlightLog log = read_flight_page(words);
    if (log.header.rank == uint64_t(first_rank_ + local)) return log;
  } catch (const BadInput&) {
  }
  return {};
}

std::string FlightMemory::place_of(int rank) const {
  const std::optional<FlightLog> log = log_of(rank - first_rank_);
  return log ? log->place : "";
}

std::vector<std::string> FlightMemory::table(const std::vector<RankEnd>& ends,
                                             const RankEnd& cause) const {
  std::vector<FlightRank> ranks;
  for (int local = 0; local < ranks_; ++local) {
    std::optional<FlightLog> log = log_of(local);
    if (!log) continue;
    FlightRank rank{.log = *std::move(log)};
    for (const RankEnd& end : ends) {
      if (end.rank == first_rank_ + local) rank.end = end.how();
    }
    if (cause.rank == first_rank_ + local) {
      rank.end = cause.how();
      rank.failed = !cause.may_be_answer();
    }
    ranks.push_back(std::move(rank));
  }
  return flight_table(std::move(ranks), steady_ns());
}

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
