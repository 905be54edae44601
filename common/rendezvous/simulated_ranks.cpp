#include "common/rendezvous/simulated_ranks.h"

#include <algorithm>
#include <chrono>
#include <set>

namespace lockstep {

int KindsMeeting::take_kind() {
  const std::lock_guard lock(mutex_);
  return taken_++;
}

std::map<int, std::string> KindsMeeting::meet(const std::string& name, int kind,
                                              const std::optional<std::string>& mine,
                                              const std::vector<int>& awaited,
                                              double timeout_seconds) {
  std::unique_lock lock(mutex_);
  if (mine) {
    left_[name].texts[kind] = *mine;
    changed_.notify_all();
  }
  const auto all_came = [&] {
    const auto found = left_.find(name);
    return std::ranges::all_of(awaited, [&](int other) {
      return found != left_.end() && found->second.texts.contains(other);
    });
  };
  changed_.wait_for(lock, std::chrono::duration<double>(timeout_seconds), all_came);
  const auto found = left_.find(name);
  if (found == left_.end()) return {};
  if (awaited.empty() || ++found->second.seen < awaited.size()) return found->second.texts;
  std::map<int, std::string> texts = std::move(found->second.texts);
  left_.erase(found);
  return texts;
}

bool SimulatedRanks::are_alike(const std::vector<int>& ranks) const {
  return std::ranges::all_of(ranks,
                             [&](int rank) { return kind_of(rank) == kind_of(ranks.front()); });
}

Meeting LikeRanksStore::meet(const std::string& name, const std::optional<std::string>& mine,
                             const std::vector<int>& awaited, double timeout_seconds) {
  std::set<int> kinds;
  for (const int rank : awaited) kinds.insert(ranks_.kind_of(rank));
  const std::map<int, std::string> texts = ranks_.meeting->meet(
      name, ranks_.kind_of(rank_), mine, {kinds.begin(), kinds.end()}, timeout_seconds);
  Meeting meeting;
  for (int rank = 0; rank < world_size(); ++rank) {
    const auto found = texts.find(ranks_.kind_of(rank));
    meeting.texts.push_back(found == texts.end() ? std::nullopt : std::optional(found->second));
  }
  return meeting;
}

}  // namespace lockstep
