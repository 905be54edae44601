#include "common/comm/call_check.h"

#include <algorithm>

#include "common/core/error.h"

namespace lockstep {
namespace {

using Op = Call::Op;
using Calls = std::vector<std::vector<IssuedCall>>;

bool is_point_to_point(const IssuedCall& issued) {
  return issued.call.op == Op::send || issued.call.op == Op::receive;
}

std::vector<const Call*> collectives(const std::vector<IssuedCall>& calls) {
  std::vector<const Call*> found;
  for (const IssuedCall& issued : calls) {
    if (!is_point_to_point(issued)) found.push_back(&issued.call);
  }
  return found;
}

/// The calls of `rank` that send to, or receive from, `peer`.
std::vector<size_t> transfers(const Calls& calls, int rank, Op op, int peer) {
  std::vector<size_t> found;
  for (size_t i = 0; i < calls[rank].size(); ++i) {
    const Call& call = calls[rank][i].call;
    if (call.op == op && call.peer == peer) found.push_back(i);
  }
  return found;
}

std::string text_at(const std::vector<const Call*>& calls, size_t i) {
  return i < calls.size() ? calls[i]->text() : "nothing";
}

}  // namespace

void compare_calls(const Calls& calls, int64_t group, const std::vector<std::string>& names) {
  const auto rank_name = [&](int rank) { return fmt::format("rank {} ({})", rank, names[rank]); };
  const int world_size = static_cast<int>(calls.size());
  const std::vector<const Call*> first = collectives(calls[0]);
  for (int rank = 1; rank < world_size; ++rank) {
    const std::vector<const Call*> other = collectives(calls[rank]);
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      if (text_at(first, i) == text_at(other, i)) continue;
      fail<PeerLost>(
          "collective {} of group {}: {} called {}, {} called {}; all ranks must make the same "
          "calls "
          "in the same order",
          i + 1, group, rank_name(0), text_at(first, i), rank_name(rank), text_at(other, i));
    }
  }
  for (int from = 0; from < world_size; ++from) {
    for (int to = 0; to < world_size; ++to) {
      const std::vector<size_t> sends = transfers(calls, from, Op::send, to);
      const std::vector<size_t> receives = transfers(calls, to, Op::receive, from);
      for (size_t i = 0; i < std::max(sends.size(), receives.size()); ++i) {
        const Call* sent = i < sends.size() ? &calls[from][sends[i]].call : nullptr;
        const Call* taken = i < receives.size() ? &calls[to][receives[i]].call : nullptr;
        if (sent && taken && sent->mine.count == taken->mine.count &&
            sent->mine.type == taken->mine.type) {
          continue;
        }
        fail<PeerLost>(
            "transfer {} of group {}: {} called {}, {} called {}; every send needs a "
            "receive of as many elements of the same type",
            i + 1, group, rank_name(from), sent ? sent->text() : "nothing", rank_name(to),
            taken ? taken->text() : "nothing");
      }
    }
  }
}

size_t matching_receive(const Calls& calls, int sender, size_t send) {
  const int receiver = calls[sender][send].call.peer;
  const std::vector<size_t> sends = transfers(calls, sender, Op::send, receiver);
  const size_t number = std::find(sends.begin(), sends.end(), send) - sends.begin();
  return transfers(calls, receiver, Op::receive, sender)[number];
}

}  // namespace lockstep
