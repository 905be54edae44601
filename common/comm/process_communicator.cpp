#include "common/comm/process_communicator.h"

#include <utility>

#include "common/core/error.h"

namespace lockstep {
namespace {

using Op = Call::Op;

FlightKind kind_of(const Call& call) {
  if (is_transfer(call)) return kTransfers;
  const bool together = call.op == Op::all_reduce || call.op == Op::all_gather ||
                        call.op == Op::reduce_scatter || call.op == Op::barrier;
  return together ? kEndsTogether : kEndsAlone;
}

}  // namespace

void ProcessCommunicator::issue(Stream stream, const Call& call) {
  issued_.push_back({rank(), stream, call});
  if (!open_) close_group();
}

void ProcessCommunicator::open_group() {
  require(!open_, "rank {}: a group of calls is open already; close it before", rank());
  open_ = true;
}

void ProcessCommunicator::close_group() {
  open_ = false;
  const std::vector<IssuedCall> issued = std::exchange(issued_, {});
  for (size_t i = 0; i < issued.size();) {
    const Stream stream = issued[i].stream;
    std::vector<Call> together{issued[i].call};
    const auto goes_along = [&](const IssuedCall& next) {
      return is_transfer(together[0]) && is_transfer(next.call) && next.stream == stream;
    };
    for (++i; i < issued.size() && goes_along(issued[i]); ++i) together.push_back(issued[i].call);
    enqueue(stream, together, flight_of(together));
  }
}

FlightCall ProcessCommunicator::flight_of(const std::vector<Call>& together) {
  const Call& first = together[0];
  FlightEntry entry{.number = is_transfer(first) ? ++transfers_ : ++collectives_,
                    .group = flight_.number,
                    .kind = kind_of(first)};
  if (flight_.recorder == nullptr) return {nullptr, entry};
  entry.members = members_of(together);
  std::string text = first.text();
  if (together.size() > 1) text += fmt::format(" and {} more", together.size() - 1);
  for (const Call& call : together)
    entry.bytes += uint64_t(call.mine.count * size_of(call.mine.type));
  put_flight_text(entry.name, name_of(first.op));
  put_flight_text(entry.label, first.label);
  put_flight_text(entry.text, text);
  return {flight_.recorder.get(), entry};
}

/// FlightEntry::members.
uint64_t ProcessCommunicator::members_of(const std::vector<Call>& together) const {
  const auto rank_in_job = [&](int rank) {
    return flight_.members.empty() ? rank : flight_.members.at(size_t(rank));
  };
  if (rank_in_job(world_size() - 1) >= 64) return 0;  // the largest
  uint64_t members = 0;
  const auto add = [&](int rank) { members |= uint64_t{1} << rank_in_job(rank); };
  if (is_transfer(together[0])) {
    for (const Call& call : together) add(call.peer);
  } else {
    for (int rank = 0; rank < world_size(); ++rank) add(rank);
  }
  return members;
}

}  // namespace lockstep
