#include "common/comm/sim_communicator.h"

#include <algorithm>

#include "common/kernels/sim/sim_stream.h"

namespace lockstep {
namespace {

using Op = Call::Op;

int64_t bytes_of(const Elements& x) { return x.count * size_of(x.type); }

/// The messages of one call, which rank 0 sends and receives one after another.
class Messages {
 public:
  Messages(const Profile& profile, const std::vector<int>& hosts)
      : profile_(profile),
        hosts_(hosts),
        slowest_(std::ranges::count(hosts, hosts[0]) < std::ssize(hosts) ? Link::network
                                                                         : Link::device) {}

  /// Rank 0 sends to its right neighbour, and receives as much from its left one.
  void round(int64_t bytes) {
    ns_ += profile_.message_ns(slowest_, double(bytes));
    sent_ += bytes;
  }
  /// A message between rank 0 and another.
  void send(int64_t bytes, int to) {
    ns_ += profile_.message_ns(link_to(to), double(bytes));
    sent_ += bytes;
  }
  void receive(int64_t bytes, int from) {
    ns_ += profile_.message_ns(link_to(from), double(bytes));
  }
  /// Of two that run at the same time, the longer one counts.
  void at_the_same_time(const Messages& other) {
    ns_ = std::max(ns_, other.ns_);
    sent_ += other.sent_;
  }

  int64_t ns() const { return ns_; }
  int64_t sent() const { return sent_; }

 private:
  Link link_to(int rank) const {
    return hosts_[size_t(rank)] == hosts_[0] ? Link::device : Link::network;
  }

  const Profile& profile_;
  const std::vector<int>& hosts_;  // of the ranks
  Link slowest_;
  int64_t ns_ = 0, sent_ = 0;
};

class SimCommunicator final : public Communicator {
 public:
  explicit SimCommunicator(std::vector<int> hosts)
      : Communicator(0, int(hosts.size()), std::make_shared<SentBytes>("simulated messages")),
        hosts_(std::move(hosts)) {}

 private:
  void enqueue(Stream stream, const std::vector<Call>& together, FlightCall) override {
    auto& simulated = static_cast<SimStream&>(stream.backend());
    Messages all(simulated.profile(), hosts_);
    for (const Call& call : together) {
      Messages messages(simulated.profile(), hosts_);
      if (world_size() > 1) exchange(call, messages);
      sent()->add(call.purpose, messages.sent());
      all.at_the_same_time(messages);
      leave_result(call, simulated.host());
    }
    simulated.enqueue(name_of(together.front().op), all.ns());
  }

  /// The parts of a message of n numbers go round a ring, as in tcp_transport.cpp and in NCCL.
  void exchange(const Call& call, Messages& messages) const {
    const int others = world_size() - 1;
    const int64_t bytes = bytes_of(call.mine);
    const auto part_bytes = [&](int part) {
      return ring_part(call.mine.count, part, world_size()).count * size_of(call.mine.type);
    };
    switch (call.op) {
      case Op::all_reduce:
        for (int step = 0; step < others; ++step) messages.round(part_bytes(-step - 1));
        for (int step = 0; step < others; ++step) messages.round(part_bytes(-step));
        return;
      case Op::all_gather:
      case Op::reduce_scatter:
        for (int step = 0; step < others; ++step) messages.round(bytes);
        return;
      case Op::broadcast:  // in pieces, from one to the next: the last one has it so much later
        if (call.peer != 1) {
          messages.round(bytes);
        } else {
          messages.receive(bytes, 1);
        }
        for (int hop = 1; hop < others; ++hop) messages.round(0);
        return;
      case Op::send:
        return messages.send(bytes, call.peer);
      case Op::receive:
        return messages.receive(bytes, call.peer);
      case Op::barrier:
        for (int reached = 1; reached < world_size(); reached *= 2) messages.round(0);
        return;
    }
  }

  /// What is known of a result: all ranks have put in the same.
  void leave_result(const Call& call, SimHost& host) const {
    const auto bytes = size_t(bytes_of(call.mine));
    const double factor =
        call.reduces() && call.reduction == Reduction::sum ? double(world_size()) : 1;
    if (call.op == Op::all_gather) {
      for (int rank = 0; rank < world_size(); ++rank) {
        host.copy(call.all.part(rank * call.mine.count, call.mine.count).data, call.mine.data,
                  bytes);
      }
    } else if (call.op == Op::reduce_scatter) {
      host.copy_known(call.mine.data, call.all.data, bytes, factor);
    } else if (call.op == Op::all_reduce) {
      host.copy_known(call.mine.data, call.mine.data, bytes, factor);
      add_up_counts(call, factor);
    }
  }

  static void add_up_counts(const Call& call, double factor) {
    if (call.mine.type != ElementType::i64 || !SimHost::is_memory(call.mine.data)) return;
    auto* const counts = static_cast<int64_t*>(call.mine.data);
    for (int64_t i = 0; i < call.mine.count; ++i) counts[i] *= int64_t(factor);
  }

  const std::vector<int> hosts_;
};

}  // namespace

std::unique_ptr<Communicator> make_sim_communicator(const std::vector<int>& members, int per_host) {
  std::vector<int> hosts;
  for (const int rank : members) hosts.push_back(rank / per_host);
  return std::make_unique<SimCommunicator>(std::move(hosts));
}

}  // namespace lockstep
