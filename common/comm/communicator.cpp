#include "common/comm/communicator.h"

#include <fmt/format.h>

#include "common/core/device.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

using Op = Call::Op;

FlightKind kind_of(const Call& call) {
  if (call.is_transfer()) return kTransfers;
  const bool together = call.op == Op::all_reduce || call.op == Op::all_gather ||
                        call.op == Op::reduce_scatter || call.op == Op::barrier;
  return together ? kEndsTogether : kEndsAlone;
}

}  // namespace

// --- A call --------------------------------------------------------------------------------------

const char* name_of(Call::Op op) {
  switch (op) {
    case Op::all_reduce:
      return "all_reduce";
    case Op::broadcast:
      return "broadcast";
    case Op::all_gather:
      return "all_gather";
    case Op::reduce_scatter:
      return "reduce_scatter";
    case Op::send:
      return "send";
    case Op::receive:
      return "receive";
    case Op::barrier:
      return "barrier";
  }
  return "?";
}

Elements Elements::part(int64_t first, int64_t part_count) const {
  return {static_cast<char*>(data) + first * size_of(type), part_count, type, device};
}

bool Call::reduces() const { return op == Op::all_reduce || op == Op::reduce_scatter; }

std::string Call::text(const std::string& peer_name) const {
  std::string text = name_of(op);
  if (op != Op::barrier) text += fmt::format(" of {} {}", mine.count, name_of(mine.type));
  if (reduces()) text += reduction == Reduction::sum ? ", sum" : ", average";
  if (op == Op::broadcast) text += fmt::format(", root {}", peer);
  if (is_transfer()) {
    text += op == Op::send ? " to " : " from ";
    text += peer_name.empty() ? fmt::format("rank {}", peer) : peer_name;
  }
  if (!label.empty()) text += " for " + label;
  return text;
}

uint64_t Call::number() const {
  uint64_t number = uint64_t(mine.count);
  for (const int part : {int(op), int(mine.type), int(reduction), peer}) {
    number = number << 5 | uint64_t(part & 31);
  }
  return number;
}

int64_t Call::ring_bytes(int rank, int world_size) const {
  const int64_t others = world_size - 1, bytes = size_of(mine.type), n = mine.count;
  const int64_t own = ring_part(n, rank, world_size).count,
                right = ring_part(n, rank + 1, world_size).count;
  switch (op) {
    case Op::all_reduce:  // all parts but its own, then all but its right neighbour's
      return (2 * n - own - right) * bytes;
    case Op::all_gather:
    case Op::reduce_scatter:
      return others * n * bytes;
    case Op::broadcast:  // from the root on, up to its left neighbour
      return (rank + 1) % world_size == peer ? 0 : n * bytes;
    case Op::send:
      return n * bytes;
    case Op::receive:
    case Op::barrier:
      return 0;
  }
  return 0;
}

// --- Who makes calls -----------------------------------------------------------------------------

int64_t Communicator::bytes_of_all_reduce(const Elements& x) const {
  return Call{.op = Op::all_reduce, .mine = x}.ring_bytes(rank_, world_size_);
}

void Communicator::all_reduce(Stream stream, const Elements& x, Reduction reduction) {
  issue(stream, {.op = Op::all_reduce, .mine = x, .all = {}, .reduction = reduction});
}

void Communicator::broadcast(Stream stream, const Elements& x, int root) {
  issue(stream, {.op = Op::broadcast, .mine = x, .all = {}, .peer = root});
}

void Communicator::all_gather(Stream stream, const Elements& mine, const Elements& all) {
  issue(stream, {.op = Op::all_gather, .mine = mine, .all = all});
}

void Communicator::reduce_scatter(Stream stream, const Elements& all, const Elements& mine,
                                  Reduction reduction) {
  issue(stream, {.op = Op::reduce_scatter, .mine = mine, .all = all, .reduction = reduction});
}

void Communicator::send(Stream stream, const Elements& x, int to) {
  issue(stream, {.op = Op::send, .mine = x, .all = {}, .peer = to});
}

void Communicator::receive(Stream stream, const Elements& x, int from) {
  issue(stream, {.op = Op::receive, .mine = x, .all = {}, .peer = from});
}

void Communicator::barrier(Stream stream) { issue(stream, {.op = Op::barrier}); }

void Communicator::issue(Stream stream, Call call) {
  call.label = label_;
  call.purpose = purpose_;
  check(stream, call);
  if (open_) return issued_.push_back({stream, std::move(call)});
  const std::vector<Call> alone{std::move(call)};
  const std::optional<ScopedRange> range = range_on(stream);
  enqueue(stream, alone, flight_of(alone));
}

std::optional<ScopedRange> Communicator::range_on(Stream stream) const {
  if (name_.empty()) return std::nullopt;
  return std::optional<ScopedRange>(std::in_place, stream, name_);
}

void Communicator::open_group() {
  require(!open_, "{}: a group of calls is open already; close it before", who());
  open_ = true;
}

void Communicator::close_group() {
  open_ = false;
  const std::vector<Issued> issued = std::exchange(issued_, {});
  for (size_t i = 0; i < issued.size();) {
    const Stream stream = issued[i].stream;
    std::vector<Call> together{issued[i].call};
    const auto goes_along = [&](const Issued& next) {
      return together[0].is_transfer() && next.call.is_transfer() && next.stream == stream;
    };
    for (++i; i < issued.size() && goes_along(issued[i]); ++i) together.push_back(issued[i].call);
    const std::optional<ScopedRange> range = range_on(stream);
    enqueue(stream, together, flight_of(together));
  }
}

// --- Checks that one rank can make alone ---------------------------------------------------------

void Communicator::set_names(std::function<std::string(int rank)> name_of,
                             const std::string& members) {
  name_of_ = std::move(name_of);
  who_ = name_of_(rank_) + (members.empty() ? "" : " of " + members);
}

void Communicator::check(Stream stream, const Call& call) const {
  const auto that = [&](bool holds, const auto& why) {  // puts nothing into words while all is well
    if (!holds) fail<BadInput>("{}: {}{}", who(), call.text(), why());
  };
  that(call.peer >= 0 && call.peer < world_size_,
       [&] { return fmt::format(": there are ranks 0 to {}", world_size_ - 1); });
  that(!call.is_transfer() || call.peer != rank_,
       [] { return ": a rank does not send to itself"; });
  that(!call.reduces() || call.reduction == Reduction::sum || call.mine.type != ElementType::i64,
       [] { return ": whole numbers have no average; use the sum"; });
  const bool everywhere = call.op == Op::all_gather || call.op == Op::reduce_scatter;
  that(!everywhere ||
           (call.all.count == world_size_ * call.mine.count && call.all.type == call.mine.type),
       [&] {
         return fmt::format(": the elements of all {} ranks must be {} {}, found {} {}",
                            world_size_, world_size_ * call.mine.count, name_of(call.mine.type),
                            call.all.count, name_of(call.all.type));
       });
  // CPU devices share one address space: a copy that was forgotten would go unnoticed on them.
  for (const Elements* elements : {&call.mine, &call.all}) {
    that(!elements->device || elements->device == &stream.device(), [&] {
      return fmt::format(" on a stream of {}, its tensor is on {}; copy it there first",
                         stream.device().name(), elements->device->name());
    });
  }
}

// --- What the flight recorder is told ------------------------------------------------------------

FlightCall Communicator::flight_of(const std::vector<Call>& together) {
  const Call& first = together[0];
  FlightEntry entry{.number = first.is_transfer() ? ++transfers_ : ++collectives_,
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
uint64_t Communicator::members_of(const std::vector<Call>& together) const {
  const auto rank_in_job = [&](int rank) {
    return flight_.members.empty() ? rank : flight_.members.at(size_t(rank));
  };
  if (rank_in_job(world_size() - 1) >= 64) return 0;  // the largest
  uint64_t members = 0;
  const auto add = [&](int rank) { members |= uint64_t{1} << rank_in_job(rank); };
  if (together[0].is_transfer()) {
    for (const Call& call : together) add(call.peer);
  } else {
    for (int rank = 0; rank < world_size(); ++rank) add(rank);
  }
  return members;
}

}  // namespace lockstep
