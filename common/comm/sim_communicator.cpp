#include "common/comm/sim_communicator.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "common/core/error.h"
#include "common/kernels/sim/sim_stream.h"
#include "common/rendezvous/agreement.h"
#include "common/rendezvous/wire.h"

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
  SimCommunicator(std::vector<int> hosts, std::shared_ptr<Store> unlike, double timeout_seconds)
      : Communicator(unlike ? unlike->rank() : 0, int(hosts.size()),
                     std::make_shared<SentBytes>("simulated messages")),
        hosts_(std::move(hosts)),
        ring_(hosts_),
        unlike_(std::move(unlike)),
        timeout_(timeout_seconds) {}

 private:
  void enqueue(Stream stream, const std::vector<Call>& together, FlightCall) override {
    auto& simulated = static_cast<SimStream&>(stream.backend());
    if (unlike_) meet(together, simulated);
    if (unlike_ || simulated.busy_since() > last_end_) ring_.all_come();
    const int64_t sent_before = bytes_sent();
    const int64_t ns = world_size() > 1 ? time_of(together, simulated.profile()) : 0;
    simulated.enqueue(name_of(together.front().op), ns, bytes_sent() - sent_before);
    last_end_ = simulated.free_at();
    for (const Call& call : together) {
      if (!unlike_) leave_result(call, simulated.host());
    }
  }

  // --- Ranks of several kinds --------------------------------------------------------------------

  /// Lets the stream wait for the last of the ranks that the call concerns. Whole numbers that are
  /// copied or added up get their true values: the host reads some of them.
  void meet(const std::vector<Call>& together, SimStream& stream) {
    const Call& call = together.front();
    require(together.size() == 1,
            "{}: {} and {} more: simulated ranks that differ make one call at a time", who(),
            call.text(), together.size() - 1);
    const int peer = call.is_transfer() ? call.peer : kAll;
    const std::string mine = arrival(call, stream.begin_of_next());
    std::vector<std::string> all;
    within(fmt::format("{}: {}", who(), call.text()), [&] {
      all = exchange(store_with(peer), fmt::format("call {}", ++calls_[peer]), mine, timeout_);
    });
    std::vector<std::string> numbers;
    for (const std::string& text : all) {
      WireReader other(text);
      stream.wait_until(int64_t(other.number(8)));
      const auto bytes = int64_t(other.number(8));
      require(bytes == bytes_of(call.mine), "{}: {}: found {} bytes on the other side, expected {}",
              who(), call.text(), bytes, bytes_of(call.mine));
      numbers.push_back(other.text());
    }
    if (has_numbers(call)) leave_numbers(call, numbers);
  }

  /// When a rank comes to a call, with how many bytes, and its whole numbers.
  static std::string arrival(const Call& call, int64_t ns) {
    std::string text;
    put_number(text, uint64_t(ns), 8);
    put_number(text, uint64_t(bytes_of(call.mine)), 8);
    const auto* const numbers = static_cast<const char*>(call.mine.data);
    put_text(text, has_numbers(call) ? std::string_view(numbers, size_t(bytes_of(call.mine))) : "");
    return text;
  }
  static bool has_numbers(const Call& call) {
    return call.mine.type == ElementType::i64 && SimHost::is_memory(call.mine.data);
  }

  /// Of those ranks that the call concerns, in their order.
  void leave_numbers(const Call& call, const std::vector<std::string>& of_ranks) const {
    auto* const mine = static_cast<int64_t*>(call.mine.data);
    if (call.op == Op::receive || call.op == Op::broadcast) {
      const bool of_two = call.op == Op::receive;
      const std::string& sent = of_ranks.at(size_t(of_two ? call.peer > rank() : call.peer));
      std::memcpy(mine, sent.data(), sent.size());
    } else if (call.op == Op::all_reduce) {
      std::vector<int64_t> part(size_t(call.mine.count));
      std::fill_n(mine, part.size(), 0);
      for (const std::string& text : of_ranks) {
        std::memcpy(part.data(), text.data(), text.size());
        for (size_t i = 0; i < part.size(); ++i) mine[i] += part[i];
      }
    }
  }

  /// Of all ranks, or of this one and a peer.
  Store& store_with(int peer) {
    if (peer == kAll) return *unlike_;
    std::unique_ptr<Store>& pair = pairs_[peer];
    if (!pair) {
      const auto [low, high] = std::minmax({peer, rank()});
      pair = std::make_unique<SubgroupStore>(unlike_, std::vector{low, high},
                                             fmt::format("ranks {} and {}", low, high));
    }
    return *pair;
  }

  // --- What a call takes -------------------------------------------------------------------------

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
    const auto part_bytes = [&](int part) {
      return ring_part(call.mine.count, part, world_size()).count * size_of(call.mine.type);
    };
    const auto round = [&](int part) {  // of rank 0, which is `rank()` parts before this one
      ring_.round(profile, part_bytes(part));
      sent()->add(call.purpose, part_bytes(rank() + part));
    };
    switch (call.op) {
      case Op::all_reduce:
        for (int step = 0; step < others; ++step) round(-step - 1);
        for (int step = 0; step < others; ++step) round(-step);
        return ring_.take_time();
      case Op::all_gather:
      case Op::reduce_scatter:
        for (int step = 0; step < others; ++step) ring_.round(profile, bytes);
        sent()->add(call.purpose, others * bytes);
        return ring_.take_time();
      case Op::broadcast:  // from the root on, up to its left neighbour
        sent()->add(call.purpose, call.ring_bytes(rank(), world_size()));
        return ring_.time_through(profile, world_size(), bytes);
      default:  // a barrier: twice as many ranks know of each other after each message
        return int64_t(std::bit_width(unsigned(others))) * ring_.time_through(profile, 2, 0);
    }
  }

  Link link_to(int peer) const {
    return hosts_[size_t(peer)] == hosts_[size_t(rank())] ? Link::device : Link::network;
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

  static constexpr int kAll = -1;

  const std::vector<int> hosts_;  // of the ranks
  Ring ring_;
  const std::shared_ptr<Store> unlike_;  // where ranks of several kinds meet; null: all are alike
  const double timeout_;
  std::map<int, std::unique_ptr<Store>> pairs_;  // by peer
  std::map<int, int64_t> calls_;                 // so far, by peer or kAll
  int64_t last_end_ = 0;                         // of the last call
};

}  // namespace

std::unique_ptr<Communicator> make_sim_communicator(const std::vector<int>& members, int per_host,
                                                    std::shared_ptr<Store> unlike,
                                                    double timeout_seconds) {
  std::vector<int> hosts;
  for (const int rank : members) hosts.push_back(rank / per_host);
  return std::make_unique<SimCommunicator>(std::move(hosts), std::move(unlike), timeout_seconds);
}

}  // namespace lockstep
