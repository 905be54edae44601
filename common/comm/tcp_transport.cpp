// All ranks pass parts of the numbers on to their right neighbours, at the same time: every
// connection is busy in both directions, and no rank carries more than another (Patarasuk and Yuan,
// Journal of Parallel and Distributed Computing 69, 2009).
//
//   reduce_parts  part p starts at rank p+1; every rank on its way adds its own. After W-1 steps it
//                 has come to rank p, complete.
//   gather_parts  part p starts at rank p and goes round; after W-1 steps all ranks have all parts.
//
// All-reduce is first one, then the other: 2 (W-1)/W of the numbers leave each rank.

#include "common/comm/tcp_transport.h"

#include <algorithm>
#include <array>
#include <utility>

#include "common/comm/tcp_mesh.h"
#include "common/comm/typed_elements.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

using Op = Call::Op;

constexpr int64_t kPieceBytes = 256 << 10;  // of a broadcast: passed on while the next comes

template <class T>
std::span<std::byte> bytes_at(T* x, int64_t count) {
  return std::as_writable_bytes(std::span(x, static_cast<size_t>(count)));
}

class TcpTransport final : public HostTransport {
 public:
  TcpTransport(Store& store, double timeout_seconds)
      : timeout_(timeout_seconds),
        mesh_(std::make_unique<TcpMesh>(store, timeout_seconds)),
        me_(mesh_->rank()),
        ranks_(mesh_->world_size()) {}

  std::string description() const override { return "tcp"; }

  void run(const Call& call, uint64_t) override {
    if (call.op != Op::barrier && call.mine.count == 0) return;
    with_peers(
        [&] { with_type(call.mine.type, [&](auto zero) { run_typed<decltype(zero)>(call); }); });
  }

  void transfer(const std::vector<Call>& calls) override {
    std::vector<OutgoingBytes> out;
    std::vector<IncomingBytes> in;
    for (const Call& call : calls) {
      const auto memory =
          bytes_at(static_cast<char*>(call.mine.data), call.mine.count * size_of(call.mine.type));
      if (call.op == Op::send) out.push_back({call.peer, memory});
      if (call.op == Op::receive) in.push_back({call.peer, memory});
    }
    with_peers([&] { mesh_->exchange(out, in, timeout_); });
  }

  int64_t bytes_sent() const override { return mesh_ ? mesh_->bytes_sent() : 0; }

 private:
  RingPart part(int64_t count, int number) const { return ring_part(count, number, ranks_); }
  int right() const { return (me_ + 1) % ranks_; }
  int left() const { return (me_ + ranks_ - 1) % ranks_; }

  template <class Work>
  void with_peers(Work work) {
    if (!mesh_) throw PeerLost(broken_);
    try {
      work();
    } catch (const Error& error) {
      broken_ = error.what();
      mesh_.reset();
      throw;
    }
  }

  template <class T>
  void run_typed(const Call& call) {
    T* const mine = numbers_of<T>(call.mine);
    T* const all = numbers_of<T>(call.all);
    const int64_t n = call.mine.count;
    switch (call.op) {
      case Op::all_reduce: {
        const T* sum = reduce_parts(mine, n, call.reduction);
        std::copy_n(sum, part(n, me_).count, mine + part(n, me_).first);
        return gather_parts(mine, n);
      }
      case Op::reduce_scatter:
        std::copy_n(reduce_parts(all, ranks_ * n, call.reduction), n, mine);
        return;
      case Op::reduce:
        return reduce(mine, n, call);
      case Op::broadcast:
        return broadcast(mine, n, call.peer);
      case Op::all_gather:
        if (mine != all + me_ * n) std::copy_n(mine, n, all + me_ * n);
        return gather_parts(all, ranks_ * n);
      case Op::barrier:
        return barrier();
      case Op::send:
      case Op::receive:
        return;  // see transfer()
    }
  }

  // --- The two rounds ----------------------------------------------------------------------------

  /// The sum, or average, over all ranks of part `me` of x [count], which stays as it is. The
  /// result is in memory that the next call reuses.
  template <class T>
  const T* reduce_parts(const T* x, int64_t count, Reduction reduction) {
    const auto room = static_cast<size_t>((count / ranks_ + 1) * int64_t{sizeof(T)});
    for (std::vector<std::byte>& memory : scratch_) memory.resize(std::max(memory.size(), room));
    T* sum = reinterpret_cast<T*>(scratch_[0].data());
    T* coming = reinterpret_cast<T*>(scratch_[1].data());
    const RingPart begin = part(count, me_ - 1);
    std::copy_n(x + begin.first, begin.count, sum);
    for (int step = 0; step < ranks_ - 1; ++step) {
      const RingPart out = part(count, me_ - step - 1), in = part(count, me_ - step - 2);
      mesh_->exchange(right(), bytes_at(sum, out.count), left(), bytes_at(coming, in.count),
                      timeout_);
      for (int64_t i = 0; i < in.count; ++i) coming[i] += x[in.first + i];
      std::swap(sum, coming);
    }
    finish_sum(sum, part(count, me_).count, reduction, ranks_);
    return sum;
  }

  /// Every rank's part `me` of x [count] goes to all.
  template <class T>
  void gather_parts(T* x, int64_t count) {
    for (int step = 0; step < ranks_ - 1; ++step) {
      const RingPart out = part(count, me_ - step), in = part(count, me_ - step - 1);
      mesh_->exchange(right(), bytes_at(x + out.first, out.count), left(),
                      bytes_at(x + in.first, in.count), timeout_);
    }
  }

  // --- To and from one rank ----------------------------------------------------------------------

  template <class T>
  void reduce(T* x, int64_t count, const Call& call) {
    const T* sum = reduce_parts(x, count, call.reduction);
    const RingPart own = part(count, me_);
    if (me_ != call.peer) {
      return mesh_->send(call.peer, std::as_bytes(std::span(sum, static_cast<size_t>(own.count))),
                         timeout_);
    }
    std::copy_n(sum, own.count, x + own.first);
    for (int other = 0; other < ranks_; ++other) {
      const RingPart in = part(count, other);
      if (other != me_) mesh_->receive(other, bytes_at(x + in.first, in.count), timeout_);
    }
  }

  /// Down the ring from the root, in pieces.
  template <class T>
  void broadcast(T* x, int64_t count, int root) {
    const bool receives = me_ != root, sends = right() != root;
    const int64_t most = kPieceBytes / int64_t{sizeof(T)};
    for (int64_t first = 0; first < count; first += most) {
      const auto piece = bytes_at(x + first, std::min(most, count - first));
      if (receives) mesh_->receive(left(), piece, timeout_);
      if (sends) mesh_->send(right(), piece, timeout_);
    }
  }

  /// After step s every rank knows that the 2^(s+1) ranks up to itself have come.
  void barrier() {
    for (int distance = 1; distance < ranks_; distance *= 2) {
      const std::byte here{};
      std::byte there{};
      mesh_->exchange((me_ + distance) % ranks_, {&here, 1}, (me_ + ranks_ - distance) % ranks_,
                      {&there, 1}, timeout_);
    }
  }

  double timeout_;
  std::unique_ptr<TcpMesh> mesh_;  // none after an error
  std::string broken_;             // that error
  int me_, ranks_;
  std::array<std::vector<std::byte>, 2> scratch_;
};

}  // namespace

std::shared_ptr<HostTransport> connect_tcp(Store& store, double timeout_seconds) {
  return std::make_shared<TcpTransport>(store, timeout_seconds);
}

}  // namespace lockstep
