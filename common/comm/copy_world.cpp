#include "common/comm/copy_world.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "common/comm/ring_part.h"
#include "common/core/error.h"
#include "common/core/listed.h"
#include "common/kernels/kernels.h"

namespace lockstep {
namespace {

using Op = Call::Op;
using RankCalls = std::vector<IssuedCall>;  // one call of every rank

/// Everything after it, on any of the streams, starts when all streams have reached it. Returns the
/// events of their arrival.
std::vector<Event> meet(const RankCalls& ranks) {
  std::vector<Event> arrived;
  for (const IssuedCall& rank : ranks) arrived.push_back(rank.stream.record());
  for (const IssuedCall& rank : ranks) {
    for (const Event& event : arrived) rank.stream.wait(event);
  }
  return arrived;
}

int64_t bytes_of(const Elements& x) { return x.count * size_of(x.type); }

/// Numbers of one rank.
struct RankElements {
  int rank;
  Elements elements;
};

/// Enqueues the ranks' copies and sums, and counts what comes from one rank's memory into
/// another's: for the rank that has it before.
class Mover {
 public:
  Mover(const GroupRecorder& recorder, Purpose purpose) : recorder_(recorder), purpose_(purpose) {}

  void copy(Stream stream, const RankElements& from, const RankElements& to) const {
    if (from.elements.data == to.elements.data) return;  // in place; others may be reading it
    stream.copy(to.elements.data, from.elements.data, static_cast<size_t>(bytes_of(from.elements)));
    count(from.rank, to.rank, from.elements);
  }
  /// `rank` sums up the ranks' `sources`, in rank order, into all `targets`.
  void sum(const IssuedCall& rank, const std::vector<RankElements>& sources,
           const std::vector<RankElements>& targets) const;

 private:
  void count(int from, int to, const Elements& x) const {
    if (from != to) recorder_.sent(from).add(purpose_, bytes_of(x));
  }
  const GroupRecorder& recorder_;
  Purpose purpose_;
};

void Mover::sum(const IssuedCall& rank, const std::vector<RankElements>& sources,
                const std::vector<RankElements>& targets) const {
  const Elements& first = sources[0].elements;
  const bool average = rank.call.reduction == Reduction::average;
  RankSum work{.type = first.type,
               .count = first.count,
               .factor = average ? 1.0 / double(sources.size()) : 1.0,
               .sources = static_cast<int>(sources.size()),
               .targets = static_cast<int>(targets.size())};
  for (size_t i = 0; i < sources.size(); ++i) {
    work.source[i] = sources[i].elements.data;
    count(sources[i].rank, rank.rank, sources[i].elements);
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    work.target[i] = targets[i].elements.data;
    count(rank.rank, targets[i].rank, targets[i].elements);
  }
  if (work.count > 0) rank.stream.kernels().sum_ranks(rank.stream, work);
}

/// all_reduce and reduce: each rank sums up one slice of the elements, from all ranks and for all
/// ranks that want the result, so that all devices work at once and no element is read twice.
void sum_slice(const RankCalls& ranks, int rank, const Mover& mover) {
  const Call& call = ranks[rank].call;
  const RingPart slice = ring_part(call.mine.count, rank, static_cast<int>(ranks.size()));
  std::vector<RankElements> sources;
  for (const IssuedCall& other : ranks) {
    sources.push_back({other.rank, other.call.mine.part(slice.first, slice.count)});
  }
  mover.sum(ranks[rank], sources,
            call.op == Op::reduce ? std::vector{sources[call.peer]} : sources);
}

void reduce_scatter(const RankCalls& ranks, int rank, const Mover& mover) {
  const Call& call = ranks[rank].call;
  std::vector<RankElements> sources;
  for (const IssuedCall& other : ranks) {
    sources.push_back({other.rank, other.call.all.part(rank * call.mine.count, call.mine.count)});
  }
  mover.sum(ranks[rank], sources, {{rank, call.mine}});
}

/// What `rank` contributes to a collective, between the two meetings.
void do_share(const RankCalls& ranks, int rank, const Mover& mover) {
  const Stream stream = ranks[rank].stream;
  const Call& call = ranks[rank].call;
  const int64_t count = call.mine.count;
  const Call& root = ranks[call.peer].call;
  const RankElements mine{rank, call.mine};
  switch (call.op) {
    case Op::all_reduce:
    case Op::reduce:
      return sum_slice(ranks, rank, mover);
    case Op::reduce_scatter:
      return reduce_scatter(ranks, rank, mover);
    case Op::broadcast:
      if (rank != call.peer) mover.copy(stream, {call.peer, root.mine}, mine);
      return;
    case Op::all_gather:
      for (const IssuedCall& other : ranks) {
        mover.copy(stream, {other.rank, other.call.mine},
                   {rank, call.all.part(other.rank * count, count)});
      }
      return;
    case Op::gather:
      return mover.copy(stream, mine, {call.peer, root.all.part(rank * count, count)});
    case Op::scatter:
      return mover.copy(stream, {call.peer, root.all.part(rank * count, count)}, mine);
    case Op::send:
    case Op::receive:
    case Op::barrier:
      return;
  }
}

bool all_done(const std::vector<Event>& events) {
  return std::all_of(events.begin(), events.end(), [](const Event& event) { return event.done(); });
}

}  // namespace

CopyWorld::CopyWorld(std::vector<Device*> devices)
    : SingleProcessWorld(std::move(devices), "the copies that are enqueued") {
  require(world_size() <= kMostRanks,
          "a world of {} ranks in one process: at most {}, use fewer devices", world_size(),
          kMostRanks);
}

// --- Groups --------------------------------------------------------------------------------------

void CopyWorld::enqueue(const GroupCalls& calls) {
  while (!meetings_.empty() && all_done(meetings_.front().finished)) settle_first();
  for (const std::vector<IssuedCall>& together : in_order(calls)) {
    const Mover mover(recorder_, together[0].call.purpose);
    if (!is_transfer(together[0].call)) {
      hold_meeting(together, [&] {
        for (int rank = 0; rank < world_size(); ++rank) do_share(together, rank, mover);
      });
      continue;
    }
    for (size_t i = 0; i < together.size(); i += 2) {
      const IssuedCall &sender = together[i], &receiver = together[i + 1];
      hold_meeting({sender, receiver}, [&] {
        mover.copy(receiver.stream, {sender.rank, sender.call.mine},
                   {receiver.rank, receiver.call.mine});
      });
    }
  }
}

void CopyWorld::hold_meeting(const std::vector<IssuedCall>& members,
                             const std::function<void()>& share) {
  Meeting meeting{.group = recorder_.group(), .call = members[0].call};
  for (const IssuedCall& member : members) meeting.ranks.push_back(member.rank);
  meeting.arrived = meet(members);
  share();
  meeting.finished = meet(members);
  meetings_.push_back(std::move(meeting));
}

// --- Waiting -------------------------------------------------------------------------------------

void CopyWorld::give_up(const std::string& why) {
  recorder_.break_world(why);
  throw PeerLost(why);
}

/// Takes the first meeting, which is over, off the list. Throws the error of a rank that failed.
void CopyWorld::settle_first() {
  const Meeting meeting = std::move(meetings_.front());
  meetings_.pop_front();
  for (size_t i = 0; i < meeting.ranks.size(); ++i) {
    try {
      meeting.finished[i].synchronize();
    } catch (const PeerLost& error) {
      give_up(error.what());  // it names the device already
    } catch (const std::exception& error) {
      give_up(fmt::format("{} failed: {}", devices_[meeting.ranks[i]]->name(), error.what()));
    }
  }
}

void CopyWorld::wait(double timeout_seconds) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_seconds);
  while (!meetings_.empty()) {
    const Meeting& first = meetings_.front();
    while (!all_done(first.finished)) {
      if (Clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        continue;
      }
      std::vector<std::string> missing;
      for (size_t i = 0; i < first.ranks.size(); ++i) {
        if (first.arrived[i].done()) continue;
        missing.push_back(recorder_.rank_name(first.ranks[i]));
      }
      give_up(fmt::format("group {} of collectives ({}): {} within {} s", first.group,
                          first.call.text(),
                          missing.empty() ? "all ranks came but did not finish"
                                          : fmt::format("{} did not come", listed(missing)),
                          timeout_seconds));
    }
    settle_first();
  }
}

}  // namespace lockstep
