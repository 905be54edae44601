#include "common/comm/call_check.h"

#include <algorithm>

#include "common/core/error.h"

namespace lockstep {
namespace {

using Op = Call::Op;

bool is_collective(const IssuedCall& issued) { return !is_transfer(issued.call); }

std::vector<const Call*> collectives(const std::vector<IssuedCall>& calls) {
  std::vector<const Call*> found;
  for (const IssuedCall& issued : calls) {
    if (is_collective(issued)) found.push_back(&issued.call);
  }
  return found;
}

/// The calls of `rank` that send to, or receive from, `peer`.
std::vector<size_t> transfers(const GroupCalls& calls, int rank, Op op, int peer) {
  std::vector<size_t> found;
  for (size_t i = 0; i < calls[rank].size(); ++i) {
    const Call& call = calls[rank][i].call;
    if (call.op == op && call.peer == peer) found.push_back(i);
  }
  return found;
}

/// The number of the call that takes what call number `send` of rank `sender` sends.
size_t matching_receive(const GroupCalls& calls, int sender, size_t send) {
  const int receiver = calls[sender][send].call.peer;
  const std::vector<size_t> sends = transfers(calls, sender, Op::send, receiver);
  const size_t number = std::find(sends.begin(), sends.end(), send) - sends.begin();
  return transfers(calls, receiver, Op::receive, sender)[number];
}

std::string text_at(const std::vector<const Call*>& calls, size_t i) {
  return i < calls.size() ? calls[i]->text() : "nothing";
}

}  // namespace

uint64_t number_of(const Call& call) {
  uint64_t number = uint64_t(call.mine.count);
  for (const int part : {int(call.op), int(call.mine.type), int(call.reduction), call.peer}) {
    number = number << 5 | uint64_t(part & 31);
  }
  return number;
}

bool is_transfer(const Call& call) { return call.op == Op::send || call.op == Op::receive; }

void compare_calls(const GroupCalls& calls, int64_t group, const std::vector<std::string>& names) {
  const auto rank_name = [&](int rank) { return fmt::format("rank {} ({})", rank, names[rank]); };
  const int world_size = static_cast<int>(calls.size());
  const std::vector<const Call*> first = collectives(calls[0]);
  for (int rank = 1; rank < world_size; ++rank) {
    const std::vector<const Call*> other = collectives(calls[rank]);
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      if (text_at(first, i) == text_at(other, i)) continue;
      fail<PeerLost>(
          "collective {} of group {}: {} called {}, {} called {}; all ranks must make the "
          "same calls in the same order",
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

std::vector<std::vector<IssuedCall>> in_order(const GroupCalls& calls) {
  const auto place = [&](int rank, size_t number) {  // collectives before this call
    return std::count_if(calls[rank].begin(), calls[rank].begin() + number, is_collective);
  };
  // Transfers, collective, transfers, collective, ..., transfers.
  std::vector<std::vector<IssuedCall>> lists(2 * place(0, calls[0].size()) + 1);
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    for (size_t number = 0; number < calls[rank].size(); ++number) {
      const IssuedCall& issued = calls[rank][number];
      if (is_collective(issued)) lists[2 * place(issued.rank, number) + 1].push_back(issued);
      if (issued.call.op != Op::send) continue;
      const size_t receive = matching_receive(calls, issued.rank, number);
      const int64_t behind = std::max(place(issued.rank, number), place(issued.call.peer, receive));
      lists[2 * behind].push_back(issued);
      lists[2 * behind].push_back(calls[issued.call.peer][receive]);
    }
  }
  std::erase_if(lists, [](const auto& list) { return list.empty(); });
  return lists;
}

}  // namespace lockstep
