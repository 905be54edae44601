#include "common/comm/tcp_transport.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "common/comm/host_transport.h"
#include "common/comm/peer_meeting.h"
#include "common/core/error.h"
#include "common/rendezvous/agreement.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/store.h"

namespace lockstep {

// --- The connections -----------------------------------------------------------------------------

namespace {

constexpr const char* kAddresses = "addresses";  // what the ranks meet for

/// A listener alone would wait for a rank that has died.
void require_none_gone(Store& store, const std::vector<int>& missing) {
  for (const int rank : look(store, kAddresses).gone) {
    if (std::ranges::count(missing, rank) > 0) throw PeerLost(who_went_first(store));
  }
}

}  // namespace

TcpMesh::TcpMesh(Store& store, double timeout_seconds)
    : rank_(store.rank()), peers_(static_cast<size_t>(store.world_size())) {
  const Deadline deadline(timeout_seconds);
  // The address from which this rank reaches the store is where its host can be reached.
  const Socket listener = listen_on({store.local_address().host, 0});
  const std::string mine = listener.local_address().text();
  PeerMeeting meeting(store, listener, mine);
  // Nobody connects before all listen: the store learns at once of a rank that dies until then.
  const std::vector<std::string> all =
      lockstep::exchange(store, kAddresses, mine, deadline.seconds_left());
  for (int lower = 0; lower < rank_; ++lower) {
    const std::string& where = all[size_t(lower)];
    meeting.add(
        lower,
        [&store, lower, where](const Deadline& until) {
          return connect_to_lower(store, lower, where, until);
        },
        where, deadline);
  }
  peers_ = meeting.meet(deadline, {.check_missing = [&](const std::vector<int>& missing) {
                          require_none_gone(store, missing);
                        }});
}

/// The higher rank of two connects, so that there is one connection.
Socket TcpMesh::connect_to_lower(const Store& store, int lower, const std::string& where,
                                 const Deadline& deadline) {
  Address address = parse_address(where, "address of " + store.name_of(lower));
  // The store's host is where the store is, whatever its host's name means on that host.
  if (store.is_host(lower)) address.host = store.host_address().host;
  if (is_loopback(address.host) && !is_loopback(store.local_address().host)) {
    fail<EnvironmentError>(
        "{} can be reached from its own host only ({}): its MASTER_ADDR leads to a loopback "
        "address there; give the address of rank 0's host in numbers",
        store.name_of(lower), address.text());
  }
  return connect_to(address, deadline);
}

void TcpMesh::name_peers(const std::function<std::string(int rank)>& name_of) {
  for (int rank = 0; rank < world_size(); ++rank) peers_[size_t(rank)].name_peer(name_of(rank));
}

const Socket& TcpMesh::peer(int rank) const {
  require(0 <= rank && rank < world_size() && rank != rank_,
          "rank {} has no connection to rank {}; expected another one of 0 to {}", rank_, rank,
          world_size() - 1);
  return peers_[static_cast<size_t>(rank)];
}

void TcpMesh::exchange(std::span<const OutgoingBytes> out, std::span<const IncomingBytes> in,
                       double timeout_seconds) {
  std::vector<Sending> sending;
  std::vector<Receiving> receiving;
  for (const OutgoingBytes& message : out) sending.push_back({&peer(message.to), message.bytes});
  for (const IncomingBytes& message : in) receiving.push_back({&peer(message.from), message.bytes});
  if (!broken_.empty()) throw PeerLost(broken_);
  try {
    transfer(sending, receiving, Deadline(timeout_seconds));
    for (const Sending& message : sending) bytes_sent_ += std::ssize(message.bytes);
  } catch (const Error& error) {
    broken_ = error.what();
    const std::lock_guard lock(closing_);
    for (Socket& peer : peers_) peer.close();
    throw;
  }
}

void TcpMesh::break_off() {
  const std::lock_guard lock(closing_);
  for (const Socket& peer : peers_) peer.shut_down();
}

void TcpMesh::exchange(int to, std::span<const std::byte> sent, int from,
                       std::span<std::byte> received, double timeout_seconds) {
  const OutgoingBytes out{to, sent};
  const IncomingBytes in{from, received};
  exchange({&out, 1}, {&in, 1}, timeout_seconds);
}

void TcpMesh::send(int to, std::span<const std::byte> bytes, double timeout_seconds) {
  const OutgoingBytes out{to, bytes};
  exchange({&out, 1}, {}, timeout_seconds);
}

void TcpMesh::receive(int from, std::span<std::byte> bytes, double timeout_seconds) {
  const IncomingBytes in{from, bytes};
  exchange({}, {&in, 1}, timeout_seconds);
}

// --- The ring ------------------------------------------------------------------------------------
//
// All ranks pass parts of the numbers on to their right neighbours, at the same time: every
// connection is busy in both directions, and no rank carries more than another (Patarasuk and Yuan,
// Journal of Parallel and Distributed Computing 69, 2009).
//
//   reduce_parts  part p starts at rank p+1; every rank on its way adds its own. After W-1 turns it
//                 has come to rank p, complete.
//   gather_parts  part p starts at rank p and goes round; after W-1 turns all ranks have all parts.
//
// All-reduce is first one, then the other: 2 (W-1)/W of the numbers leave each rank.

namespace {

using Op = Call::Op;

constexpr int64_t kPieceBytes = 256 << 10;  // of a broadcast: passed on while the next comes

std::span<std::byte> bytes_at(void* x, int64_t bytes) {
  return {static_cast<std::byte*>(x), static_cast<size_t>(bytes)};
}

class TcpTransport final : public HostTransport {
 public:
  TcpTransport(Store& store, double timeout_seconds)
      : timeout_(timeout_seconds),
        mesh_(store, timeout_seconds),
        me_(mesh_.rank()),
        ranks_(mesh_.world_size()) {}

  std::string description() const override { return "tcp"; }

  void run(const Call& call, uint64_t) override {
    if (call.op == Op::barrier) return barrier();
    if (call.mine.count == 0) return;
    if (!call.reduces()) return move(call);
    with_type(call.mine.type, [&](auto zero) { reduce<decltype(zero)>(call); });
  }

  void transfer(const std::vector<Call>& calls) override {
    std::vector<OutgoingBytes> out;
    std::vector<IncomingBytes> in;
    for (const Call& call : calls) {
      const auto memory = bytes_at(call.mine.data, call.mine.count * size_of(call.mine.type));
      if (call.op == Op::send) out.push_back({call.peer, memory});
      if (call.op == Op::receive) in.push_back({call.peer, memory});
    }
    mesh_.exchange(out, in, timeout_);
  }

  void name_peers(const std::function<std::string(int rank)>& name_of) override {
    mesh_.name_peers(name_of);
  }
  void break_off() override { mesh_.break_off(); }

  int64_t bytes_sent() const override { return mesh_.bytes_sent(); }

 private:
  RingPart part(int64_t count, int number) const { return ring_part(count, number, ranks_); }
  int right() const { return (me_ + 1) % ranks_; }
  int left() const { return (me_ + ranks_ - 1) % ranks_; }

  // --- Sums --------------------------------------------------------------------------------------

  template <class T>
  void reduce(const Call& call) {
    T* const mine = static_cast<T*>(call.mine.data);
    const int64_t n = call.mine.count;
    if (call.op == Op::reduce_scatter) {
      const T* const all = static_cast<const T*>(call.all.data);
      std::copy_n(reduce_parts(all, ranks_ * n, call.reduction), n, mine);
      return;
    }
    const T* const sum = reduce_parts(mine, n, call.reduction);
    const RingPart own = part(n, me_);
    std::copy_n(sum, own.count, mine + own.first);
    gather_parts(mine, n, sizeof(T));
  }

  /// The sum, or average, over all ranks of part `me` of x [count], which stays as it is. Numbers
  /// of 16 bits travel as such, so they are rounded in every turn; an average is divided before the
  /// last time. The result is in memory that the next call reuses.
  template <class T>
  const T* reduce_parts(const T* x, int64_t count, Reduction reduction) {
    constexpr int64_t kSize = sizeof(T);
    const auto room = static_cast<size_t>((count / ranks_ + 1) * kSize);
    for (std::vector<std::byte>& memory : scratch_) memory.resize(std::max(memory.size(), room));
    T* sum = reinterpret_cast<T*>(scratch_[0].data());
    T* coming = reinterpret_cast<T*>(scratch_[1].data());
    const RingPart begin = part(count, me_ - 1);
    std::copy_n(x + begin.first, begin.count, sum);
    for (int turn = 0; turn < ranks_ - 1; ++turn) {
      const RingPart out = part(count, me_ - turn - 1), in = part(count, me_ - turn - 2);
      mesh_.exchange(right(), bytes_at(sum, out.count * kSize), left(),
                     bytes_at(coming, in.count * kSize), timeout_);
      const bool is_whole = turn == ranks_ - 2;
      add_two(coming, coming, x + in.first, in.count,
              factor_of<T>(is_whole ? reduction : Reduction::sum, ranks_));
      std::swap(sum, coming);
    }
    return sum;
  }

  // --- What only moves ---------------------------------------------------------------------------

  void move(const Call& call) {
    auto* const mine = static_cast<std::byte*>(call.mine.data);
    const int64_t n = call.mine.count, size = size_of(call.mine.type);
    if (call.op == Op::broadcast) return broadcast(mine, n * size, call.peer);
    auto* const all = static_cast<std::byte*>(call.all.data);  // an all-gather
    if (mine != all + me_ * n * size) std::memcpy(all + me_ * n * size, mine, size_t(n * size));
    gather_parts(all, ranks_ * n, size);
  }

  /// Every rank's part `me` of x [count], numbers of `size` bytes, goes to all.
  void gather_parts(void* x, int64_t count, int64_t size) {
    const auto bytes_of = [&](RingPart numbers) {
      return bytes_at(static_cast<std::byte*>(x) + numbers.first * size, numbers.count * size);
    };
    for (int turn = 0; turn < ranks_ - 1; ++turn) {
      const RingPart out = part(count, me_ - turn), in = part(count, me_ - turn - 1);
      mesh_.exchange(right(), bytes_of(out), left(), bytes_of(in), timeout_);
    }
  }

  /// Down the ring from the root, in pieces.
  void broadcast(std::byte* x, int64_t bytes, int root) {
    const bool receives = me_ != root, sends = right() != root;
    for (int64_t first = 0; first < bytes; first += kPieceBytes) {
      const auto piece = bytes_at(x + first, std::min(kPieceBytes, bytes - first));
      if (receives) mesh_.receive(left(), piece, timeout_);
      if (sends) mesh_.send(right(), piece, timeout_);
    }
  }

  /// After turn t every rank knows that the 2^(t+1) ranks up to itself have come.
  void barrier() {
    for (int distance = 1; distance < ranks_; distance *= 2) {
      const std::byte here{};
      std::byte there{};
      mesh_.exchange((me_ + distance) % ranks_, {&here, 1}, (me_ + ranks_ - distance) % ranks_,
                     {&there, 1}, timeout_);
    }
  }

  double timeout_;
  TcpMesh mesh_;
  int me_, ranks_;
  std::array<std::vector<std::byte>, 2> scratch_;
};

}  // namespace

std::shared_ptr<HostTransport> connect_tcp(Store& store, double timeout_seconds) {
  return std::make_shared<TcpTransport>(store, timeout_seconds);
}

}  // namespace lockstep
