#include "common/comm/in_process_world.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>
#include <utility>

#include "common/core/error.h"
#include "common/kernels/kernels.h"

namespace lockstep {
namespace {

using Op = Call::Op;
using Ranks = std::vector<IssuedCall>;  // one call of every rank

/// Everything behind it, on any of the streams, starts when all of them have come here. Returns the
/// events of their coming.
std::vector<Event> meet(const Ranks& ranks) {
  std::vector<Event> arrived;
  for (const IssuedCall& rank : ranks) arrived.push_back(rank.stream.record());
  for (const IssuedCall& rank : ranks) {
    for (const Event& event : arrived) rank.stream.wait(event);
  }
  return arrived;
}

void copy(Stream stream, const Elements& from, const Elements& to) {
  if (from.data == to.data) return;  // in place; other ranks may be reading it
  stream.copy(to.data, from.data, static_cast<size_t>(from.count * size_of(from.type)));
}

/// `rank` sums up, in rank order, what the ranks have in `sources` into all `targets`.
void sum(Stream stream, const std::vector<Elements>& sources, const std::vector<Elements>& targets,
         Reduction reduction) {
  RankSum work{.type = sources[0].type,
               .count = sources[0].count,
               .factor = reduction == Reduction::average ? 1.0 / double(sources.size()) : 1.0,
               .sources = static_cast<int>(sources.size()),
               .targets = static_cast<int>(targets.size())};
  for (size_t i = 0; i < sources.size(); ++i) work.source[i] = sources[i].data;
  for (size_t i = 0; i < targets.size(); ++i) work.target[i] = targets[i].data;
  if (work.count > 0) stream.kernels().sum_ranks(stream, work);
}

/// all_reduce and reduce: each rank sums up one slice of the elements, of all ranks and for all
/// that want it, so that all devices work at once and no element is read twice.
void sum_slice(const Ranks& ranks, int rank) {
  const Call& call = ranks[rank].call;
  const int64_t world_size = static_cast<int64_t>(ranks.size());
  const int64_t first = call.mine.count * rank / world_size;
  const int64_t count = call.mine.count * (rank + 1) / world_size - first;
  std::vector<Elements> sources, targets;
  for (const IssuedCall& other : ranks) sources.push_back(other.call.mine.part(first, count));
  targets = call.op == Op::reduce ? std::vector{sources[call.peer]} : sources;
  sum(ranks[rank].stream, sources, targets, call.reduction);
}

void reduce_scatter(const Ranks& ranks, int rank) {
  const Call& call = ranks[rank].call;
  std::vector<Elements> sources;
  for (const IssuedCall& other : ranks) {
    sources.push_back(other.call.all.part(rank * call.mine.count, call.mine.count));
  }
  sum(ranks[rank].stream, sources, {call.mine}, call.reduction);
}

/// What `rank` contributes to a collective, between the two meetings.
void do_share(const Ranks& ranks, int rank) {
  const auto& [stream, call] = ranks[rank];
  const int64_t count = call.mine.count;
  const Call& root = ranks[call.peer].call;
  switch (call.op) {
    case Op::all_reduce:
    case Op::reduce:
      return sum_slice(ranks, rank);
    case Op::reduce_scatter:
      return reduce_scatter(ranks, rank);
    case Op::broadcast:
      if (rank != call.peer) copy(stream, root.mine, call.mine);
      return;
    case Op::all_gather:
      for (size_t other = 0; other < ranks.size(); ++other) {
        copy(stream, ranks[other].call.mine, call.all.part(int64_t(other) * count, count));
      }
      return;
    case Op::gather:
      return copy(stream, call.mine, root.all.part(rank * count, count));
    case Op::scatter:
      return copy(stream, root.all.part(rank * count, count), call.mine);
    case Op::send:
    case Op::receive:
    case Op::barrier:
      return;
  }
}

bool all_done(const std::vector<Event>& events) {
  return std::all_of(events.begin(), events.end(), [](const Event& event) { return event.done(); });
}

bool is_collective(const IssuedCall& issued) {
  return issued.call.op != Op::send && issued.call.op != Op::receive;
}

}  // namespace

class InProcessWorld::Member final : public Communicator {
 public:
  Member(InProcessWorld& world, int rank) : Communicator(rank, world.size()), world_(world) {}

 private:
  void issue(Stream stream, const Call& call) override { world_.add(rank(), stream, call); }
  InProcessWorld& world_;
};

InProcessWorld::InProcessWorld(std::vector<Device*> devices)
    : LocalWorld(std::move(devices)), calls_(devices_.size()) {
  require(size() <= kMostRanks, "a world of {} ranks in one process: at most {}, use fewer devices",
          size(), kMostRanks);
  for (int rank = 0; rank < size(); ++rank) ranks_.push_back(std::make_unique<Member>(*this, rank));
}

// --- Groups --------------------------------------------------------------------------------------

void InProcessWorld::refuse_if_broken() const {
  if (!broken_.empty()) throw PeerLost(broken_);
}

void InProcessWorld::open_group() {
  refuse_if_broken();
  require(!open_, "group {} of collectives is still open; close it before the next", group_);
  open_ = true;
  ++group_;
}

void InProcessWorld::add(int rank, Stream stream, const Call& call) {
  refuse_if_broken();
  require(open_, "rank {}: {} outside a CollectiveGroup; the calls of all ranks belong in one",
          rank, call.text());
  require(&stream.device() == devices_[rank], "rank {}: {} on a stream of {}, the rank is on {}",
          rank, call.text(), stream.device().name(), devices_[rank]->name());
  calls_[rank].push_back({stream, call});
}

void InProcessWorld::abandon_group() {
  open_ = false;
  for (auto& calls : calls_) calls.clear();
}

void InProcessWorld::close_group() {
  const Calls calls = std::exchange(calls_, Calls(devices_.size()));
  open_ = false;
  try {
    compare_calls(calls, group_, device_names());
  } catch (const PeerLost& error) {
    broken_ = error.what();
    throw;
  }
  enqueue(calls);
}

/// Collectives in their order, then the transfers, whose order no other call depends on.
void InProcessWorld::enqueue(const Calls& calls) {
  while (!meetings_.empty() && all_done(meetings_.front().finished)) settle_first();
  std::vector<std::vector<IssuedCall>> collectives(calls[0].size());
  for (const auto& of_rank : calls) {
    size_t number = 0;
    for (const IssuedCall& issued : of_rank) {
      if (is_collective(issued)) collectives[number++].push_back(issued);
    }
  }
  for (const Ranks& ranks : collectives) {
    if (ranks.empty()) continue;
    std::vector<Event> arrived = meet(ranks);
    for (int rank = 0; rank < size(); ++rank) do_share(ranks, rank);
    std::vector<int> all(ranks.size());
    std::iota(all.begin(), all.end(), 0);
    meetings_.push_back({group_, all, std::move(arrived), meet(ranks)});
  }
  for (int sender = 0; sender < size(); ++sender) {
    for (size_t i = 0; i < calls[sender].size(); ++i) {
      const auto& [stream, call] = calls[sender][i];
      if (call.op != Op::send) continue;
      const IssuedCall& other = calls[call.peer][matching_receive(calls, sender, i)];
      std::vector<Event> arrived = meet({calls[sender][i], other});
      copy(other.stream, call.mine, other.call.mine);
      meetings_.push_back(
          {group_, {sender, call.peer}, std::move(arrived), meet({calls[sender][i], other})});
    }
  }
}

// --- Waiting -------------------------------------------------------------------------------------

std::vector<std::string> InProcessWorld::device_names() const {
  std::vector<std::string> names;
  for (const Device* device : devices_) names.push_back(device->name());
  return names;
}

void InProcessWorld::break_world(std::string why) {
  broken_ = std::move(why);
  throw PeerLost(broken_);
}

/// Takes the first meeting, which is over, off the list. Throws what a rank failed of.
void InProcessWorld::settle_first() {
  const Meeting meeting = std::move(meetings_.front());
  meetings_.pop_front();
  for (size_t i = 0; i < meeting.ranks.size(); ++i) {
    try {
      meeting.finished[i].synchronize();
    } catch (const PeerLost& error) {
      break_world(error.what());  // it names the device already
    } catch (const std::exception& error) {
      break_world(fmt::format("{} failed: {}", devices_[meeting.ranks[i]]->name(), error.what()));
    }
  }
}

void InProcessWorld::wait(double timeout_seconds) {
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
        missing.push_back(
            fmt::format("rank {} ({})", first.ranks[i], devices_[first.ranks[i]]->name()));
      }
      break_world(fmt::format("group {} of collectives: {} within {} s", first.group,
                              missing.empty()
                                  ? "all ranks came but did not finish"
                                  : fmt::format("{} did not come", fmt::join(missing, ", ")),
                              timeout_seconds));
    }
    settle_first();
  }
}

}  // namespace lockstep
