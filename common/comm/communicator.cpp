#include "common/comm/communicator.h"

#include "common/core/device.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

using Op = Call::Op;

}  // namespace

// --- Checks that one rank can make alone ---------------------------------------------------------

std::string Communicator::who() const {
  return fmt::format("rank {}{}{}", rank_, members_.empty() ? "" : " of ", members_);
}

void Communicator::check(const Call& call) const {
  const std::string who = fmt::format("{}: {}", this->who(), call.text());
  require(call.peer >= 0 && call.peer < world_size_, "{}: there are ranks 0 to {}", who,
          world_size_ - 1);
  const bool point_to_point = call.op == Op::send || call.op == Op::receive;
  require(!point_to_point || call.peer != rank_, "{}: a rank does not send to itself", who);
  require(!call.reduces() || call.reduction == Reduction::sum || call.mine.type != ElementType::i64,
          "{}: whole numbers have no average; use the sum", who);
  const bool everywhere = call.op == Op::all_gather || call.op == Op::reduce_scatter;
  const bool at_root = (call.op == Op::gather || call.op == Op::scatter) && call.peer == rank_;
  if (!everywhere && !at_root) return;
  require(call.all.count == world_size_ * call.mine.count && call.all.type == call.mine.type,
          "{}: the elements of all {} ranks must be {} {}, found {} {}", who, world_size_,
          world_size_ * call.mine.count, name_of(call.mine.type), call.all.count,
          name_of(call.all.type));
}

/// CPU devices share one address space: a copy that was forgotten would go unnoticed on them.
void Communicator::check_devices(Stream stream, const Call& call) const {
  for (const Elements* elements : {&call.mine, &call.all}) {
    require(!elements->device || elements->device == &stream.device(),
            "{}: {} on a stream of {}, its tensor is on {}; copy it there first", who(),
            call.text(), stream.device().name(), elements->device ? elements->device->name() : "");
  }
}

void Communicator::check_and_issue(Stream stream, Call call) {
  call.label = label_;
  call.purpose = purpose_;
  check(call);
  check_devices(stream, call);
  issue(stream, call);
}

void Communicator::open_group() {
  fail<BadInput>("rank {}: the ranks of one process make their calls in a CollectiveGroup", rank_);
}

void Communicator::close_group() { open_group(); }

// --- The calls -----------------------------------------------------------------------------------

void Communicator::all_reduce(Stream stream, const Elements& x, Reduction reduction) {
  check_and_issue(stream, {.op = Op::all_reduce, .mine = x, .all = {}, .reduction = reduction});
}

void Communicator::broadcast(Stream stream, const Elements& x, int root) {
  check_and_issue(stream, {.op = Op::broadcast, .mine = x, .all = {}, .peer = root});
}

void Communicator::all_gather(Stream stream, const Elements& mine, const Elements& all) {
  check_and_issue(stream, {.op = Op::all_gather, .mine = mine, .all = all});
}

void Communicator::reduce_scatter(Stream stream, const Elements& all, const Elements& mine,
                                  Reduction reduction) {
  check_and_issue(stream,
                  {.op = Op::reduce_scatter, .mine = mine, .all = all, .reduction = reduction});
}

void Communicator::reduce(Stream stream, const Elements& x, int root, Reduction reduction) {
  check_and_issue(stream,
                  {.op = Op::reduce, .mine = x, .all = {}, .peer = root, .reduction = reduction});
}

void Communicator::gather(Stream stream, const Elements& mine, const Elements& all, int root) {
  check_and_issue(stream, {.op = Op::gather, .mine = mine, .all = all, .peer = root});
}

void Communicator::scatter(Stream stream, const Elements& all, const Elements& mine, int root) {
  check_and_issue(stream, {.op = Op::scatter, .mine = mine, .all = all, .peer = root});
}

void Communicator::send(Stream stream, const Elements& x, int to) {
  check_and_issue(stream, {.op = Op::send, .mine = x, .all = {}, .peer = to});
}

void Communicator::receive(Stream stream, const Elements& x, int from) {
  check_and_issue(stream, {.op = Op::receive, .mine = x, .all = {}, .peer = from});
}

void Communicator::barrier(Stream stream) { check_and_issue(stream, {.op = Op::barrier}); }

}  // namespace lockstep
