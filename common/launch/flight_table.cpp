#include "common/launch/flight_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "common/core/text.h"
#include "common/launch/flight_state.h"
#include "common/launch/flight_words.h"

namespace lockstep {
namespace {

using Is = FlightState::Is;

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

}  // namespace lockstep
