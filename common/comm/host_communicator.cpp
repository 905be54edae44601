#include "common/comm/host_communicator.h"

#include <algorithm>
#include <utility>

#include "common/core/device.h"
#include "common/core/stream_backend.h"

namespace lockstep {

// --- What the host does --------------------------------------------------------------------------

/// One collective, or transfers that run at the same time, whose memory is the host's.
struct HostCommunicator::Task {
  Kept<Link> link;
  std::vector<Call> calls;
  FlightCall flight;
  std::string who;  // made them, for errors

  void operator()();
  void rethrow() const;
};

/// Makes the calls, and counts what they send.
void HostCommunicator::Task::operator()() {
  flight.start();
  try {
    if (!link->broken.empty()) throw PeerLost(link->broken);
    HostTransport& transport = *link->transport;
    const int64_t before = transport.bytes_sent();
    if (calls[0].is_transfer()) {
      transport.transfer(calls);
    } else if (link->roll_call && link->roll_call->compares_calls()) {
      // Comparisons are collectives, too, with numbers of their own.
      const uint64_t number = 2 * flight.number();
      link->broken = link->roll_call->difference(transport, calls[0], number - 1);
      if (!link->broken.empty()) throw PeerLost(link->broken);
      transport.run(calls[0], number);
    } else {
      transport.run(calls[0], flight.number());
    }
    link->sent->add(calls[0].purpose, transport.bytes_sent() - before);
  } catch (...) {
    flight.give_up();
    rethrow();
  }
  flight.complete();
}

/// Throws the error that is being handled, with what all ranks know of it.
void HostCommunicator::Task::rethrow() const {
  const std::string call = link->roll_call ? link->roll_call->text_of(calls[0]) : calls[0].text();
  const std::string what =
      calls[0].is_transfer() ? call : fmt::format("collective {} ({})", flight.number(), call);
  within(fmt::format("{}: {}", who, what), [&] {
    try {
      throw;
    } catch (const PeerLost& error) {
      if (!link->roll_call || !link->broken.empty()) throw;
      // Closing the connections tells peers that wait for this rank; they must come to the roll
      // call.
      link->transport.reset();
      link->broken = link->roll_call->explain(calls, flight.number(), error.what());
      if (link->of_rank) link->of_rank->break_off();  // the store knows why
      throw PeerLost(link->broken);
    }
  });
}

// --- What is enqueued ----------------------------------------------------------------------------

void HostCommunicator::enqueue(Stream stream, const std::vector<Call>& together,
                               FlightCall flight) {
  if (last_) stream.wait(*last_);
  const bool on_host = stream.device().id().kind == DeviceId::Kind::cpu;
  const std::vector<Call> calls = on_host ? together : staging_.copy_down(stream, together);
  const char* op = calls.size() == 1 ? name_of(calls[0].op) : "transfers";
  stream.backend().host_task(op, Task{link_, calls, std::move(flight), who()});
  if (!on_host) staging_.copy_up(stream, together, calls);
  last_ = stream.record();
}

int64_t HostCommunicator::bytes_of_all_reduce(const Elements& x) const {
  const int64_t bytes = x.count * size_of(x.type);
  if (bytes > largest_whole_sum_) return Communicator::bytes_of_all_reduce(x);
  return (world_size() - 1) * bytes;
}

// --- A GPU's numbers on the host -----------------------------------------------------------------

namespace {

/// What a rank's call reads, and what it writes.
struct Moves {
  Elements down{}, up{};
};

Moves moves_of(const Call& call, int rank) {
  using Op = Call::Op;
  switch (call.op) {
    case Op::all_reduce:
      return {call.mine, call.mine};
    case Op::broadcast:
      return call.peer == rank ? Moves{.down = call.mine} : Moves{.up = call.mine};
    case Op::all_gather:
      return {call.mine, call.all};
    case Op::reduce_scatter:
      return {call.all, call.mine};
    case Op::send:
      return {.down = call.mine};
    case Op::receive:
      return {.up = call.mine};
    case Op::barrier:
      return {};
  }
  return {};
}

int64_t size_in_bytes(const Elements& x) { return x.count * size_of(x.type); }

/// Rounded up, so that what follows has a cache line of its own.
int64_t room_for(const Elements& x) { return (size_in_bytes(x) + 63) / 64 * 64; }

bool lies_in(const Elements& part, const Elements& whole) {
  const char* begin = static_cast<const char*>(whole.data);
  const char* data = static_cast<const char*>(part.data);
  return data >= begin && data + size_in_bytes(part) <= begin + size_in_bytes(whole);
}

/// The call with its memory at `next`, which moves past that memory. An in-place call stays in
/// place there.
Call moved(Call call, char*& next) {
  const Elements mine = call.mine, all = call.all;
  if (all.count > 0) {
    call.all.data = next;
    next += room_for(all);
  }
  if (all.count > 0 && lies_in(mine, all)) {
    const auto offset = static_cast<char*>(mine.data) - static_cast<char*>(all.data);
    call.mine.data = static_cast<char*>(call.all.data) + offset;
  } else {
    call.mine.data = next;
    next += room_for(mine);
  }
  return call;
}

}  // namespace

std::vector<Call> HostStaging::copy_down(Stream stream, const std::vector<Call>& calls) {
  int64_t bytes = 0;
  for (const Call& call : calls) bytes += room_for(call.all) + room_for(call.mine);
  char* next = reserve(stream.device(), bytes);
  std::vector<Call> on_host;
  for (const Call& call : calls) {
    on_host.push_back(moved(call, next));
    const Elements from = moves_of(call, rank_).down, to = moves_of(on_host.back(), rank_).down;
    stream.copy(to.data, from.data, static_cast<size_t>(size_in_bytes(from)));
  }
  return on_host;
}

void HostStaging::copy_up(Stream stream, const std::vector<Call>& calls,
                          const std::vector<Call>& on_host) const {
  for (size_t i = 0; i < calls.size(); ++i) {
    const Elements from = moves_of(on_host[i], rank_).up, to = moves_of(calls[i], rank_).up;
    stream.copy(to.data, from.data, static_cast<size_t>(size_in_bytes(to)));
  }
}

/// Doubles the size, so that all pieces together are at most twice the largest.
char* HostStaging::reserve(Device& device, int64_t bytes) {
  if (bytes > bytes_) {
    const int64_t larger = std::max(bytes, 2 * bytes_);
    memory_.push_back(device.allocate_host(static_cast<size_t>(larger)));
    bytes_ = larger;
  }
  return memory_.empty() ? nullptr : static_cast<char*>(memory_.back().get());
}

}  // namespace lockstep
