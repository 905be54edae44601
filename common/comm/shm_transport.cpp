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
// the same, whichever transport carries them. Numbers of 16 bits are an exception from three ranks
// on: here a rank sees all that it adds up, in float32, and rounds once, while a ring rounds in
// every turn what it passes on.

#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <utility>

#include "common/comm/host_transport.h"
#include "common/comm/shm_segment.h"

namespace lockstep {
namespace {

using Op = Call::Op;

// --- Sends and receives --------------------------------------------------------------------------

/// Carries messages through the lanes of a shared memory, each from one rank to another.
class Lanes {
 public:
  explicit Lanes(ShmPeers& peers)
      : peers_(peers), used_(2, std::vector<bool>(size_t(peers.world_size()))) {}

  /// Sends and receives all at the same time, each as fast as its other side allows. The messages
  /// between two ranks keep their order. Throws what ShmPeers does; EnvironmentError if there is no
  /// memory for a lane that is used for the first time.
  void transfer(const std::vector<Call>& calls);
  /// Bytes that these have written.
  int64_t bytes_sent() const { return bytes_sent_; }

 private:
  /// What is left of a send or a receive.
  struct Message {
    bool sends;
    int peer;
    std::byte* bytes;
    size_t left;
  };
  void provide_lane(const Call& call);
  bool can_move(const Message& message) const;
  void move_some(Message& message);

  ShmPeers& peers_;
  std::vector<std::vector<bool>> used_;  // lanes that this rank sends by [1], receives by [0]
  int64_t bytes_sent_ = 0;
};

/// Only lanes that are used take memory. Either side may be the first to touch a lane.
void Lanes::provide_lane(const Call& call) {
  const bool sends = call.op == Call::Op::send;
  std::vector<bool>& used = used_[size_t(sends)];
  const auto peer = size_t(call.peer);
  if (used[peer]) return;
  const int me = peers_.rank();
  peers_.set_lane_aside(sends ? me : call.peer, sends ? call.peer : me);
  used[peer] = true;
}

bool Lanes::can_move(const Message& message) const {
  if (message.sends) {
    const Lane& lane = peers_.memory().lane(peers_.rank(), message.peer);
    return lane.sent.load(std::memory_order_relaxed) - lane.taken.load(std::memory_order_acquire) <
           Lane::kBytes;
  }
  const Lane& lane = peers_.memory().lane(message.peer, peers_.rank());
  return lane.sent.load(std::memory_order_acquire) > lane.taken.load(std::memory_order_relaxed);
}

/// As much as there is room for, or as has come, up to the lane's end, where it begins again.
void Lanes::move_some(Message& message) {
  const int me = peers_.rank(), from = message.sends ? me : message.peer;
  Lane& lane = peers_.memory().lane(from, message.sends ? message.peer : me);
  const uint64_t sent = lane.sent.load(std::memory_order_acquire);
  const uint64_t taken = lane.taken.load(std::memory_order_acquire);
  const size_t at = (message.sends ? sent : taken) % Lane::kBytes;
  const size_t there = message.sends ? Lane::kBytes - (sent - taken) : sent - taken;
  const size_t n = std::min({message.left, there, Lane::kBytes - at});
  if (message.sends) {
    std::memcpy(&lane.bytes[at], message.bytes, n);
    lane.sent.store(sent + n, std::memory_order_release);
    bytes_sent_ += int64_t(n);
  } else {
    std::memcpy(message.bytes, &lane.bytes[at], n);
    lane.taken.store(taken + n, std::memory_order_release);
  }
  peers_.wake(message.peer);
  message.bytes += n;
  message.left -= n;
}

void Lanes::transfer(const std::vector<Call>& calls) {
  std::vector<Message> messages;
  for (const Call& call : calls) {
    const auto bytes = static_cast<size_t>(call.mine.count * size_of(call.mine.type));
    if (bytes > 0) provide_lane(call);
    messages.push_back(
        {call.op == Call::Op::send, call.peer, static_cast<std::byte*>(call.mine.data), bytes});
  }
  // Of the messages of one lane only the first that is not done may move.
  const auto is_next = [&](const Message& message) {
    const auto first = std::ranges::find_if(messages, [&](const Message& other) {
      return other.left > 0 && other.sends == message.sends && other.peer == message.peer;
    });
    return first != messages.end() && &*first == &message;
  };
  const auto movable = [&](const Message& message) {
    return is_next(message) && can_move(message);
  };
  const auto awaited = [&](int rank) {
    return std::ranges::any_of(
        messages, [&](const Message& message) { return message.left > 0 && message.peer == rank; });
  };
  while (std::ranges::any_of(messages, [](const Message& message) { return message.left > 0; })) {
    peers_.wait([&] { return std::ranges::any_of(messages, movable); }, awaited,
                ShmPeers::Concerns::awaiting);
    for (Message& message : messages) {
      if (movable(message)) move_some(message);
    }
  }
}

// --- Rounds --------------------------------------------------------------------------------------

/// Up to here a sum takes one round: adding everything up is cheaper than to meet again.
constexpr int64_t kSmallBytes = 16 << 10;

/// Part `number` of a sum over so many ranks.
struct SummedPart {
  int number, ranks;
};

/// sum = from(p+1) + from(p+2) + ... + from(p) for part p, in this order; n numbers each. Those of
/// 16 bits are added in float32, some of them at a time, and rounded once.
template <class T, class From>
void add_up_in_float32(T* sum, int64_t n, From from, SummedPart part, Reduction reduction) {
  std::array<float, 2048> total{};  // stays in the cache
  const float factor = factor_of<T>(reduction, part.ranks);
  for (int64_t first = 0; first < n; first += std::ssize(total)) {
    const int64_t here = std::min<int64_t>(std::ssize(total), n - first);
    for (int k = 1; k <= part.ranks; ++k) {
      const T* const x = from(part.number + k) + first;
#pragma omp simd
      for (int64_t i = 0; i < here; ++i) total[i] = k == 1 ? float(x[i]) : total[i] + x[i];
    }
#pragma omp simd
    for (int64_t i = 0; i < here; ++i) sum[first + i] = total[i] * factor;
  }
}

template <class T, class From>
void add_up(T* sum, int64_t n, From from, SummedPart part, Reduction reduction) {
  if constexpr (sizeof(T) == 2) return add_up_in_float32(sum, n, from, part, reduction);
  const T* a = from(part.number + 1);
  if (part.ranks == 1) std::copy_n(a, n, sum);
  for (int k = 2; k <= part.ranks; ++k, a = sum) {
    const Reduction so_far = k < part.ranks ? Reduction::sum : reduction;
    add_two(sum, a, from(part.number + k), n, factor_of<T>(so_far, part.ranks));
  }
}

/// The part of a rank in a sum of `count` numbers at x, and what becomes of it.
template <class T>
struct Sum {
  const T* x;
  int64_t count;
  Reduction reduction;
  T* own;            // where part `me` goes
  T* all = nullptr;  // where the whole message goes, with the parts of the others; null: nowhere
};

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
    if (!peers_) throw PeerLost(broken_);
    call_ = call.number();
    try {
      if (!call.reduces()) return move(call);
      with_type(call.mine.type, [&](auto zero) { reduce(sum_of<decltype(zero)>(call)); });
    } catch (const Error& error) {
      leave(error);
      throw;
    }
  }

  void transfer(const std::vector<Call>& calls) override {
    if (!peers_) throw PeerLost(broken_);
    try {
      lanes_.transfer(calls);
    } catch (const Error& error) {
      leave(error);
      throw;
    }
  }

  void name_peers(const std::function<std::string(int rank)>& name_of) override {
    peers_->name_peers(name_of);
  }
  void break_off() override {
    const std::lock_guard lock(leaving_);
    if (peers_) peers_->break_off();
  }

  int64_t bytes_sent() const override { return bytes_shown_ + lanes_.bytes_sent(); }
  int64_t largest_whole_sum() const override { return kSmallBytes; }

 private:
  void leave(const Error& error) {
    broken_ = error.what();
    const std::lock_guard lock(leaving_);
    peers_.reset();  // closes the sockets: the others learn of it
  }

  // --- Rounds ------------------------------------------------------------------------------------

  /// Where this rank writes what it will show in the next round.
  std::byte* to_show() const { return layout_.slot(me_, round_ + 1); }
  const std::byte* shown_by(int rank) const { return layout_.slot(rank, round_); }

  /// Writes so many bytes into the slot at `place`, for so many other ranks to take them.
  void put(const void* x, int64_t bytes, void* place, int takers) {
    std::memcpy(place, x, size_t(bytes));
    count_shown(bytes, takers);
  }
  /// What the slot holds leaves this rank once for each rank that takes it.
  void count_shown(int64_t bytes, int takers) { bytes_shown_ += bytes * takers; }

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
      fail<PeerLost>("{} has come to another call", peers_->name_of(rank));
    }
  }

  /// Everything but sums: only bytes move, `bytes` of each rank.
  void move(const Call& call) {
    const int64_t bytes = call.mine.count * size_of(call.mine.type);
    auto* const mine = static_cast<std::byte*>(call.mine.data);
    auto* const all = static_cast<std::byte*>(call.all.data);
    const bool is_root = call.peer == me_;
    if (call.op == Op::broadcast) {
      show(is_root ? mine : nullptr, bytes, [&](int rank, const std::byte* shown, RingPart at) {
        if (rank == call.peer && !is_root) std::memcpy(mine + at.first, shown, size_t(at.count));
      });
    } else if (call.op == Op::all_gather) {
      show(mine, bytes, [&](int rank, const std::byte* shown, RingPart at) {
        std::byte* const place = all + rank * bytes;
        if (rank == me_ && mine == place) return;  // others may read it meanwhile
        std::memcpy(place + at.first, shown, size_t(at.count));
      });
    } else {
      meet();  // a barrier
    }
  }

  /// All ranks show the bytes at x, if any, to all others, in as many rounds as it takes.
  /// take(r, shown, at) is called for bytes `at` of each rank r's.
  template <class Take>
  void show(const std::byte* x, int64_t bytes, Take take) {
    const auto most = int64_t(layout_.slot_bytes());
    for (RingPart at{0, 0}; at.first < bytes; at.first += most) {
      at.count = std::min(most, bytes - at.first);
      if (x != nullptr) put(x + at.first, at.count, to_show(), ranks_ - 1);
      meet();
      for (int rank = 0; rank < ranks_; ++rank) take(rank, shown_by(rank), at);
    }
  }

  // --- Sums --------------------------------------------------------------------------------------

  template <class T>
  Sum<T> sum_of(const Call& call) const {
    T* const mine = static_cast<T*>(call.mine.data);
    const int64_t n = call.mine.count;
    if (call.op == Op::reduce_scatter) {
      return {static_cast<T*>(call.all.data), ranks_ * n, call.reduction, mine};
    }
    return {mine, n, call.reduction, mine + part(n, me_).first, mine};
  }

  RingPart part(int64_t count, int number) const { return ring_part(count, number, ranks_); }

  /// Of part `number`, at most `most` numbers from its number `first` on.
  RingPart piece(int64_t count, int number, int64_t first, int64_t most) const {
    const RingPart whole = part(count, number);
    return {whole.first + first, first < 0 ? 0 : std::clamp<int64_t>(whole.count - first, 0, most)};
  }

  /// Piece after piece of every part. In each round a rank adds up a piece of part `me`, for the
  /// others to see in the next one.
  template <class T>
  void reduce(const Sum<T>& sum) {
    if (sum.count * int64_t(sizeof(T)) <= kSmallBytes) return reduce_at_once(sum);
    const int64_t most = int64_t(layout_.piece_bytes() / sizeof(T));
    const int64_t longest = (sum.count + ranks_ - 1) / ranks_;  // of the parts
    for (int64_t first = 0; first < longest; first += most) {
      for (int p = 0; p < ranks_; ++p) {
        const RingPart shown = piece(sum.count, p, first, most);
        T* const place = reinterpret_cast<T*>(to_show()) + p * most;
        if (p != me_) put(sum.x + shown.first, shown.count * int64_t{sizeof(T)}, place, 1);
      }
      meet();
      const RingPart own = piece(sum.count, me_, first, most);
      const auto from = [&](int rank) {
        return rank % ranks_ == me_ ? sum.x + own.first : numbers<T>(rank % ranks_) + me_ * most;
      };
      T* const reduced = reinterpret_cast<T*>(to_show()) + ranks_ * most;
      add_up(reduced, own.count, from, {me_, ranks_}, sum.reduction);
      std::copy_n(reduced, own.count, sum.own + first);
      if (sum.all != nullptr) count_shown(own.count * int64_t{sizeof(T)}, ranks_ - 1);
      take_reduced(sum, first - most, most);
    }
    if (sum.all == nullptr) return;
    meet();  // to see the last pieces
    take_reduced(sum, (longest - 1) / most * most, most);
  }

  /// What the others have reduced of their pieces from `first` on.
  template <class T>
  void take_reduced(const Sum<T>& sum, int64_t first, int64_t most) const {
    for (int p = 0; sum.all != nullptr && p < ranks_; ++p) {
      const RingPart at = piece(sum.count, p, first, most);
      if (p != me_) std::copy_n(numbers<T>(p) + ranks_ * most, at.count, sum.all + at.first);
    }
  }

  template <class T>
  void reduce_at_once(const Sum<T>& sum) {
    // Who wants the whole reads everything; for a reduce-scatter each reads its own part.
    const bool whole = sum.all != nullptr;
    const int64_t parts_of_others = sum.count - part(sum.count, me_).count;
    std::copy_n(sum.x, sum.count, reinterpret_cast<T*>(to_show()));
    count_shown((whole ? sum.count : parts_of_others) * int64_t{sizeof(T)}, whole ? ranks_ - 1 : 1);
    meet();
    for (int p = 0; p < ranks_; ++p) {
      const RingPart at = part(sum.count, p);
      const auto from = [&](int rank) { return numbers<T>(rank % ranks_) + at.first; };
      T* const place = p == me_ ? sum.own : whole ? sum.all + at.first : nullptr;
      if (place != nullptr) add_up(place, at.count, from, {p, ranks_}, sum.reduction);
    }
  }

  /// What that rank shows, as numbers.
  template <class T>
  const T* numbers(int rank) const {
    return reinterpret_cast<const T*>(shown_by(rank));
  }

  std::mutex leaving_;
  std::unique_ptr<ShmPeers> peers_;  // none after an error
  std::string broken_;               // that error
  ShmLayout layout_;
  int me_, ranks_;
  uint64_t round_ = 0;
  uint64_t call_ = 0;        // the present one's number()
  int64_t bytes_shown_ = 0;  // to others
  Lanes lanes_;
};

}  // namespace

std::shared_ptr<HostTransport> make_shm_transport(std::unique_ptr<ShmPeers> peers) {
  return std::make_shared<ShmTransport>(std::move(peers));
}

std::shared_ptr<HostTransport> connect_shm(Store& store, double timeout_seconds) {
  return make_shm_transport(meet_in_shm(store, timeout_seconds));
}

}  // namespace lockstep
