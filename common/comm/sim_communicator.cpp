#include "common/comm/sim_communicator.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "common/kernels/sim/sim_stream.h"

namespace lockstep {
namespace {

using Op = Call::Op;

int64_t bytes_of(const Elements& x) { return x.count * size_of(x.type); }

/// The ranks as a ring in which each sends to its right neighbour. Hosts are alike, so the links
/// repeat, and with them the times of ranks that have the same place on their hosts: one of each is
/// looked at. A rank that waits for a slow link comes later than its neighbours, which is not lost
/// from one message to the next.
class Ring {
 public:
  /// `hosts`: of the ranks.
  explicit Ring(const std::vector<int>& hosts) {
    const size_t ranks = hosts.size();
    for (size_t r = 0; r < ranks; ++r) {
      right_.push_back(hosts[r] == hosts[(r + 1) % ranks] ? Link::device : Link::network);
    }
    const auto repeats = [&](size_t period) {
      for (size_t r = period; r < ranks; ++r) {
        if (right_[r] != right_[r % period]) return false;
      }
      return ranks % period == 0;
    };
    size_t period = 1;
    while (!repeats(period)) ++period;
    right_.resize(period);
    all_come();
  }

  /// All ranks are at the same point.
  void all_come() {
    has_.assign(right_.size(), 0);
    free_.assign(right_.size(), 0);
  }
  /// Each rank sends so many bytes, once it has what was sent to it in the round before.
  void round(const Profile& profile, int64_t bytes) {
    std::vector<int64_t> arrives(right_.size());
    for (size_t place = 0; place < right_.size(); ++place) {
      free_[place] =
          std::max(has_[place], free_[place]) + profile.transfer_ns(right_[place], double(bytes));
      arrives[(place + 1) % right_.size()] = free_[place] + profile.latency_ns(right_[place]);
    }
    has_ = arrives;
  }
  /// The time until rank 0 has what was sent to it since the last call of this.
  int64_t take_time() {
    const int64_t time = has_[0];
    for (size_t place = 0; place < right_.size(); ++place) {
      has_[place] -= time;
      free_[place] -= time;
    }
    return time;
  }
  /// A message that goes from the first rank to the last of `ranks` in pieces.
  int64_t time_through(const Profile& profile, int ranks, int64_t bytes) const {
    int64_t latency = 0, transfer = 0;
    for (size_t hop = 0; hop + 1 < size_t(ranks); ++hop) {
      const Link link = right_[hop % right_.size()];
      latency += profile.latency_ns(link);
      transfer = std::max(transfer, profile.transfer_ns(link, double(bytes)));
    }
    return latency + transfer;
  }

 private:
  std::vector<Link> right_;  // by place: to the next one
  std::vector<int64_t> has_,
      free_;  // when a rank has its message, and its link to the right is free
};

class SimCommunicator final : public Communicator {
 public:
  explicit SimCommunicator(std::vector<int> hosts)
      : Communicator(0, int(hosts.size()), std::make_shared<SentBytes>("simulated messages")),
        hosts_(std::move(hosts)),
        ring_(hosts_) {}

 private:
  void enqueue(Stream stream, const std::vector<Call>& together, FlightCall) override {
    auto& simulated = static_cast<SimStream&>(stream.backend());
    if (simulated.busy_since() > last_end_) ring_.all_come();
    const int64_t sent_before = bytes_sent();
    const int64_t ns = world_size() > 1 ? time_of(together, simulated.profile()) : 0;
    simulated.enqueue(name_of(together.front().op), ns, bytes_sent() - sent_before);
    last_end_ = simulated.free_at();
    for (const Call& call : together) leave_result(call, simulated.host());
  }

  int64_t time_of(const std::vector<Call>& together, const Profile& profile) {
    const Call& first = together.front();
    if (!first.is_transfer()) return collective_ns(first, profile);
    int64_t longest = 0;
    bool round = together.size() == 2;  // to the right and from the left
    for (const Call& call : together) {
      const int64_t bytes = bytes_of(call.mine);
      const bool sends = call.op == Op::send;
      if (sends) sent()->add(call.purpose, bytes);
      round = round && call.peer == (sends ? 1 : world_size() - 1);
      longest = std::max(longest, profile.message_ns(link_to(call.peer), double(bytes)));
    }
    if (!round || together[0].op == together[1].op) return longest;
    ring_.round(profile, bytes_of(first.mine));
    return ring_.take_time();
  }

  /// The parts of a message of n numbers go round the ring, as in tcp_transport.cpp and in NCCL.
  int64_t collective_ns(const Call& call, const Profile& profile) {
    const int others = world_size() - 1;
    const int64_t bytes = bytes_of(call.mine);
    const auto round = [&](int64_t sent_bytes) {
      ring_.round(profile, sent_bytes);
      sent()->add(call.purpose, sent_bytes);
    };
    const auto part_bytes = [&](int part) {
      return ring_part(call.mine.count, part, world_size()).count * size_of(call.mine.type);
    };
    switch (call.op) {
      case Op::all_reduce:
        for (int step = 0; step < others; ++step) round(part_bytes(-step - 1));
        for (int step = 0; step < others; ++step) round(part_bytes(-step));
        return ring_.take_time();
      case Op::all_gather:
      case Op::reduce_scatter:
        for (int step = 0; step < others; ++step) round(bytes);
        return ring_.take_time();
      case Op::broadcast:
        if (call.peer != 1) sent()->add(call.purpose, bytes);  // the root's left neighbour is last
        return ring_.time_through(profile, world_size(), bytes);
      default:  // a barrier: twice as many ranks know of each other after each message
        return int64_t(std::bit_width(unsigned(others))) * ring_.time_through(profile, 2, 0);
    }
  }

  Link link_to(int rank) const {
    return hosts_[size_t(rank)] == hosts_[0] ? Link::device : Link::network;
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

  const std::vector<int> hosts_;  // of the ranks
  Ring ring_;
  int64_t last_end_ = 0;  // of the last call
};

}  // namespace

std::unique_ptr<Communicator> make_sim_communicator(const std::vector<int>& members, int per_host) {
  std::vector<int> hosts;
  for (const int rank : members) hosts.push_back(rank / per_host);
  return std::make_unique<SimCommunicator>(std::move(hosts));
}

}  // namespace lockstep
