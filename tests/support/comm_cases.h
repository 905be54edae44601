#pragma once
// The table of collectives, and their results by a serial program.

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "common/comm/communicator.h"
#include "common/core/error.h"

namespace lockstep::testing {

/// One kind of call. Every rank has `all` [W n] and `mine` [n]. `mine` lies behind `all` or, in
/// place, is the rank's part of `all`. Op::send is a ring: r+1 receives r's mine at the start of
/// its all. Op::receive is a gather by hand: the root receives each mine into the parts of its all.
struct Collective {
  Call::Op op;
  Reduction reduction = Reduction::sum;
  bool in_place = false;

  bool has_root() const;
  std::string name(int root) const;
  /// Issues one rank's calls.
  void issue(Communicator& comm, Stream stream, const Elements& memory, int64_t n, int root) const;
  /// The contents of the ranks' memories, [W n + n] each, after the calls.
  template <class T>
  std::vector<std::vector<T>> serial(const std::vector<std::vector<T>>& before, int64_t n,
                                     int root) const;
  /// The place in a rank's memory where `mine` begins.
  int64_t mine_at(int rank, int world_size, int64_t n) const {
    return (in_place ? rank : world_size) * n;
  }
};

/// Everything that ranks can do with elements of this type.
inline std::vector<Collective> collectives(ElementType type, int world_size) {
  using Op = Call::Op;
  std::vector<Collective> table = {{Op::all_reduce}, {Op::broadcast}, {Op::barrier}};
  for (const Op op : {Op::all_gather, Op::reduce_scatter}) {
    table.push_back({op});
    table.push_back({op, Reduction::sum, /*in_place=*/true});
  }
  if (type != ElementType::i64) {
    for (const Op op : {Op::all_reduce, Op::reduce_scatter}) {
      table.push_back({op, Reduction::average});
    }
  }
  if (world_size > 1) table.insert(table.end(), {{Op::send}, {Op::receive}});
  return table;
}

inline bool Collective::has_root() const {
  using Op = Call::Op;
  return op == Op::broadcast || op == Op::receive;
}

inline std::string Collective::name(int root) const {
  const std::string text = Call{.op = op, .mine = {}, .all = {}, .reduction = reduction}.text();
  return fmt::format("case {}{}, root {}", text, in_place ? " in place" : "", root);
}

inline void Collective::issue(Communicator& comm, Stream stream, const Elements& memory, int64_t n,
                              int root) const {
  const int me = comm.rank(), world_size = comm.world_size();
  const Elements all = memory.part(0, world_size * n);
  const Elements mine = memory.part(mine_at(me, world_size, n), n);
  switch (op) {
    case Call::Op::all_reduce:
      return comm.all_reduce(stream, mine, reduction);
    case Call::Op::broadcast:
      return comm.broadcast(stream, mine, root);
    case Call::Op::all_gather:
      return comm.all_gather(stream, mine, all);
    case Call::Op::reduce_scatter:
      return comm.reduce_scatter(stream, all, mine, reduction);
    case Call::Op::send:
      comm.send(stream, mine, (me + 1) % world_size);
      return comm.receive(stream, all.part(0, n), (me + world_size - 1) % world_size);
    case Call::Op::receive:
      if (me != root) return comm.send(stream, mine, root);
      for (int other = 0; other < world_size; ++other) {
        if (other != root) comm.receive(stream, all.part(other * n, n), other);
      }
      return;
    case Call::Op::barrier:
      return comm.barrier(stream);
  }
}

/// The sum, or average, of n elements of every rank, in rank order; rank r's begin at at[r].
/// Results of 16 bits are rounded once.
template <class T>
std::vector<T> sum_in_rank_order(const std::vector<std::vector<T>>& ranks,
                                 const std::vector<int64_t>& at, int64_t n, Reduction reduction) {
  using Sum = decltype(T() + T());
  std::vector<Sum> sums(ranks[0].begin() + at[0], ranks[0].begin() + at[0] + n);
  const Sum factor = static_cast<Sum>(1.0 / double(ranks.size()));
  Sum* sum = sums.data();  // plain pointers: test code is not optimised
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    const T* term = ranks[rank].data() + at[rank];
    for (int64_t i = 0; i < n; ++i) sum[i] += term[i];
  }
  for (int64_t i = 0; reduction == Reduction::average && i < n; ++i) sum[i] *= factor;
  return {sums.begin(), sums.end()};
}

template <class T>
std::vector<std::vector<T>> Collective::serial(const std::vector<std::vector<T>>& before, int64_t n,
                                               int root) const {
  const int world_size = static_cast<int>(before.size());
  std::vector<std::vector<T>> after = before;
  std::vector<int64_t> mine(world_size);
  for (int rank = 0; rank < world_size; ++rank) mine[rank] = mine_at(rank, world_size, n);
  const auto copy = [&](int from, int64_t from_at, int to, int64_t to_at) {
    std::copy_n(before[from].begin() + from_at, n, after[to].begin() + to_at);
  };
  const auto sum = [&](const std::vector<int64_t>& at) {
    return sum_in_rank_order(before, at, n, reduction);
  };
  std::vector<T> sums = op == Call::Op::all_reduce ? sum(mine) : std::vector<T>();
  for (int rank = 0; rank < world_size; ++rank) {
    if (op == Call::Op::reduce_scatter) sums = sum(std::vector<int64_t>(world_size, rank * n));
    std::copy(sums.begin(), sums.end(), after[rank].begin() + mine[rank]);
    if (op == Call::Op::broadcast) copy(root, mine[root], rank, mine[rank]);
    if (op == Call::Op::receive && rank != root) copy(rank, mine[rank], root, rank * n);
    if (op == Call::Op::send) copy(rank, mine[rank], (rank + 1) % world_size, 0);
    for (int other = 0; op == Call::Op::all_gather && other < world_size; ++other) {
      copy(other, mine[other], rank, other * n);
    }
  }
  return after;
}

/// Number i of a rank (splitmix64). Full mantissas: the order of a sum shows in its last bits.
template <class T>
T number(int rank, int64_t i) {
  uint64_t bits = (uint64_t(rank) + 1) * 0x9E3779B97F4A7C15u + uint64_t(i) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
  const int64_t whole = static_cast<int64_t>(bits ^ bits >> 31) >> 8;  // sixteen of them have a sum
  if constexpr (std::is_integral_v<T>) return whole;
  using Sum = decltype(T() + T());
  return T(static_cast<Sum>(whole) / static_cast<Sum>(int64_t{1} << 55));
}

}  // namespace lockstep::testing
