// Why a transport of its own for ranks of one host: a message through TCP is copied into the system
// and out of it, and every hop of a ring waits to be woken. Here a rank shows its numbers to all
// others at once, and each takes what it needs.
//
// Everything but sends and receives is done in rounds: each rank writes what it has to show into
// its slot; it says so and waits until all have (meet()); then it reads the others' slots. A rank
// has two slots, for even and odd rounds. So nobody needs to wait until all have read: whoever
// meets the others in the next round has read everything of this one.
//
//   small sums   everybody shows everything, and adds all of it up: one round
//   large sums   part p of the numbers, cut as a ring cuts them (ring_part()), is reduced by rank
//                p, piece by piece. In one round all ranks show each other the pieces that the
//                others reduce, and what they have reduced of the pieces before.
//
// Part p is added up in the order p+1, p+2, ..., p: the order of tcp_transport.cpp, so the bits are
// the same, whichever transport carries them.

#include "common/comm/shm_transport.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "common/comm/shm_lanes.h"
#include "common/comm/typed_elements.h"

namespace lockstep {
namespace {

using Op = Call::Op;

/// Up to here a sum takes one round: adding everything up is cheaper than to meet again.
constexpr int64_t kSmallBytes = 16 << 10;

class ShmTransport final : public HostTransport {
 public:
  explicit ShmTransport(std::unique_ptr<ShmPeers> peers)
      : peers_(std::move(peers)),
        layout_(peers_->memory()),
        me_(peers_->rank()),
        ranks_(peers_->world_size()),
        lanes_(*peers_) {}

  std::string description() const override { return "shm"; }

  void run(const Call& call, uint64_t) override {
    if (call.op != Op::barrier && call.mine.count == 0) return;
    call_ = call.number();
    with_peers(
        [&] { with_type(call.mine.type, [&](auto zero) { run_typed<decltype(zero)>(call); }); });
  }

  void transfer(const std::vector<Call>& calls) override {
    with_peers([&] { lanes_.transfer(calls); });
  }

  int64_t bytes_sent() const override { return bytes_shown_ + lanes_.bytes_sent(); }

 private:
  template <class Work>
  void with_peers(Work work) {
    if (!peers_) throw PeerLost(broken_);
    try {
      work();
    } catch (const Error& error) {
      broken_ = error.what();
      peers_.reset();  // closes the sockets: the others learn of it
      throw;
    }
  }

  template <class T>
  void run_typed(const Call& call) {
    T* const mine = numbers_of<T>(call.mine);
    T* const all = numbers_of<T>(call.all);
    const int64_t n = call.mine.count;
    const bool is_root = call.peer == me_;
    switch (call.op) {
      case Op::all_reduce:
        return reduce(mine, n, call.reduction, {mine + part(n, me_).first, mine, ranks_ - 1});
      case Op::reduce_scatter:
        return reduce(all, ranks_ * n, call.reduction, {mine, nullptr, 0, false});
      case Op::reduce:
        if (!is_root) return reduce<T>(mine, n, call.reduction, {.takers = 1});
        return reduce(mine, n, call.reduction, {mine + part(n, me_).first, mine});
      case Op::broadcast:
        return show(is_root ? mine : nullptr, n, ranks_ - 1,
                    [&](int r, const T* shown, RingPart at) {
                      if (r == call.peer && !is_root) std::copy_n(shown, at.count, mine + at.first);
                    });
      case Op::all_gather:
        return show(mine, n, ranks_ - 1, [&](int r, const T* shown, RingPart at) {
          if (r == me_ && mine == all + r * n) return;  // others may read it meanwhile
          std::copy_n(shown, at.count, all + r * n + at.first);
        });
      case Op::barrier:
        return meet();
      case Op::send:
      case Op::receive:
        return;  // see transfer()
    }
  }

  // --- Rounds ------------------------------------------------------------------------------------

  /// Where this rank writes what it will show in the next round.
  template <class T>
  T* to_show() const {
    return reinterpret_cast<T*>(layout_.slot(me_, round_ + 1));
  }
  /// What a rank shows in this round.
  template <class T>
  const T* shown_by(int rank) const {
    return reinterpret_cast<const T*>(layout_.slot(rank, round_));
  }

  /// Writes n numbers into the slot at `place`, for so many other ranks to take them.
  template <class T>
  void put(const T* x, int64_t n, T* place, int takers) {
    std::copy_n(x, n, place);
    count_shown<T>(n, takers);
  }
  /// What the slot holds leaves this rank once for each rank that takes it.
  template <class T>
  void count_shown(int64_t n, int takers) {
    bytes_shown_ += n * int64_t{sizeof(T)} * takers;
  }

  void meet() {
    RankState& mine = layout_.state(me_);
    mine.core.store(::sched_getcpu(), std::memory_order_relaxed);
    mine.calls[(round_ + 1) % 2].store(call_, std::memory_order_relaxed);
    mine.rounds.store(++round_, std::memory_order_release);
    for (int other = 0; other < ranks_; ++other) {
      if (other != me_) peers_->wake(other);
    }
    const auto awaited = [&](int rank) {
      return layout_.state(rank).rounds.load(std::memory_order_acquire) < round_;
    };
    peers_->wait(
        [&] {
          for (int rank = 0; rank < ranks_; ++rank) {
            if (awaited(rank)) return false;
          }
          return true;
        },
        awaited, ShmPeers::Concerns::all);
    require_same_call();
  }

  /// Whoever takes part in another call takes its numbers for those of this one.
  void require_same_call() const {
    for (int rank = 0; rank < ranks_; ++rank) {
      const auto& theirs = layout_.state(rank).calls[round_ % 2];
      if (theirs.load(std::memory_order_relaxed) == call_) continue;
      fail<PeerLost>("rank {} has come to another call", rank);
    }
  }

  /// All ranks show the n numbers at x, if any, to so many others, in as many rounds as it takes.
  /// take(r, shown, at) is called for numbers `at` of each rank r's.
  template <class T, class Take>
  void show(const T* x, int64_t n, int takers, Take take) {
    const int64_t most = int64_t(layout_.slot_bytes() / sizeof(T));
    for (RingPart at{0, 0}; at.first < n; at.first += most) {
      at.count = std::min(most, n - at.first);
      if (x != nullptr) put(x + at.first, at.count, to_show<T>(), takers);
      meet();
      for (int rank = 0; rank < ranks_; ++rank) take(rank, shown_by<T>(rank), at);
    }
  }

  // --- Sums --------------------------------------------------------------------------------------

  /// What becomes of the sums on this rank.
  template <class T>
  struct Result {
    T* own = nullptr;     // where part `me` goes, if it is wanted
    T* all = nullptr;     // where the whole message goes, with the parts of the others
    int takers = 0;       // other ranks that take part `me`
    bool gathers = true;  // whether any rank wants the others' parts
  };

  RingPart part(int64_t count, int number) const { return ring_part(count, number, ranks_); }

  /// Of part `number`, at most `most` numbers from its number `first` on.
  RingPart piece(int64_t count, int number, int64_t first, int64_t most) const {
    const RingPart whole = part(count, number);
    return {whole.first + first, first < 0 ? 0 : std::clamp<int64_t>(whole.count - first, 0, most)};
  }

  /// That piece, by the number of the part.
  auto piece_of_each(int64_t count, int64_t first, int64_t most) const {
    return [=, this](int p) { return piece(count, p, first, most); };
  }

  template <class T>
  void reduce(const T* x, int64_t count, Reduction reduction, Result<T> result) {
    if (count * int64_t(sizeof(T)) <= kSmallBytes)
      return reduce_at_once(x, count, reduction, result);
    const int64_t most = int64_t(layout_.piece_bytes() / sizeof(T));
    const int64_t longest = (count + ranks_ - 1) / ranks_;  // of the parts
    for (int64_t first = 0; first < longest; first += most) {
      for (int p = 0; p < ranks_; ++p) {
        const RingPart shown = piece(count, p, first, most);
        if (p != me_) put(x + shown.first, shown.count, to_show<T>() + p * most, 1);
      }
      meet();
      const RingPart own = piece(count, me_, first, most);
      reduce_own_piece(x, own, most, reduction, result.own, first);
      count_shown<T>(own.count, result.takers);
      take_reduced(piece_of_each(count, first - most, most), most, result);
    }
    if (!result.gathers) return;
    meet();  // to see the last pieces
    const int64_t last = (longest - 1) / most * most;
    take_reduced(piece_of_each(count, last, most), most, result);
  }

  /// Adds up piece `at` of part `me`, for the others to see in the next round.
  template <class T>
  void reduce_own_piece(const T* x, RingPart at, int64_t most, Reduction reduction, T* result,
                        int64_t first) const {
    const auto from = [&](int rank) {
      return rank % ranks_ == me_ ? x + at.first : shown_by<T>(rank % ranks_) + me_ * most;
    };
    T* const sum = to_show<T>() + ranks_ * most;
    add_up(sum, at.count, from, {me_, ranks_}, reduction);
    if (result != nullptr) std::copy_n(sum, at.count, result + first);
  }

  template <class T, class PieceOf>
  void take_reduced(PieceOf piece_of, int64_t most, const Result<T>& result) const {
    for (int p = 0; result.all != nullptr && p < ranks_; ++p) {
      const RingPart at = piece_of(p);
      if (p != me_) std::copy_n(shown_by<T>(p) + ranks_ * most, at.count, result.all + at.first);
    }
  }

  template <class T>
  void reduce_at_once(const T* x, int64_t count, Reduction reduction, const Result<T>& result) {
    // Who wants the whole reads everything; for a reduce-scatter each reads its own part.
    const int64_t parts_of_others = count - part(count, me_).count;
    std::copy_n(x, count, to_show<T>());
    count_shown<T>(result.gathers ? count : parts_of_others, result.gathers ? result.takers : 1);
    meet();
    for (int p = 0; p < ranks_; ++p) {
      const RingPart at = part(count, p);
      const auto from = [&](int rank) { return shown_by<T>(rank % ranks_) + at.first; };
      T* const sum = p == me_                ? result.own
                     : result.all == nullptr ? nullptr
                                             : result.all + at.first;
      if (sum != nullptr) add_up(sum, at.count, from, {p, ranks_}, reduction);
    }
  }

  std::unique_ptr<ShmPeers> peers_;  // none after an error
  std::string broken_;               // that error
  ShmLayout layout_;
  int me_, ranks_;
  uint64_t round_ = 0;
  uint64_t call_ = 0;        // the present one's number()
  int64_t bytes_shown_ = 0;  // to others
  ShmLanes lanes_;
};

}  // namespace

std::shared_ptr<HostTransport> make_shm_transport(std::unique_ptr<ShmPeers> peers) {
  return std::make_shared<ShmTransport>(std::move(peers));
}

}  // namespace lockstep
