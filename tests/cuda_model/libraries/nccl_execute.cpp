// What collectives compute.

#include <algorithm>
#include <cstring>

#include "libraries/nccl_clique.h"
#include "libraries/sixteen.h"
#include "runtime/turn.h"

namespace cuda_model::nccl {
namespace {

/// Sums from the last rank to the first: NCCL promises no order, so no caller may rely on one.
/// Those of 16 bits are rounded after each rank, as in a ring.
template <class T>
std::vector<T> reduce(const std::vector<Operation>& ranks, size_t first, size_t count) {
  std::vector<T> total(count);
  for (auto rank = ranks.rbegin(); rank != ranks.rend(); ++rank) {
    const T* values = static_cast<const T*>(rank->from) + first;
    for (size_t i = 0; i < count; ++i) total[i] = static_cast<T>(total[i] + values[i]);
  }
  if (ranks[0].reduction == ncclAvg) {
    const auto size = static_cast<decltype(T() + T())>(ranks.size());
    for (T& value : total) value = static_cast<T>(value / size);
  }
  return total;
}

/// What the kernel for one rank's average writes of n elements: blocks of one length, a multiple of
/// 16 bytes. NCCL 2.28.9 divides without rounding up, and leaves out what is beyond the last block.
template <class T>
size_t reached_by_one_rank(size_t n) {
  const size_t pack = 16 / sizeof(T), block_bytes = 16384;
  const size_t blocks = std::min<size_t>(32, (n * sizeof(T) + block_bytes - 1) / block_bytes);
  return blocks == 0 ? 0 : std::min(n, blocks * ((n / blocks + pack - 1) / pack * pack));
}

template <class T>
void execute_as(const std::vector<Operation>& ranks) {
  using Kind = Operation::Kind;
  const Operation& any = ranks[0];
  const size_t size = ranks.size(), n = any.count;
  const auto put = [](const std::vector<T>& values, const Operation& rank) {
    std::memcpy(rank.to, values.data(), values.size() * sizeof(T));
  };
  const auto read = [n](const Operation& rank) {
    const T* values = static_cast<const T*>(rank.from);
    return std::vector<T>(values, values + n);
  };
  std::vector<T> all;
  switch (any.kind) {
    case Kind::all_reduce:
      all = reduce<T>(ranks, 0, n);
      for (const Operation& rank : ranks) put(all, rank);
      return;
    case Kind::broadcast:
      all = read(ranks[any.peer]);
      for (const Operation& rank : ranks) put(all, rank);
      return;
    case Kind::all_gather:
      for (const Operation& rank : ranks) {
        const std::vector<T> part = read(rank);
        all.insert(all.end(), part.begin(), part.end());
      }
      for (const Operation& rank : ranks) put(all, rank);
      return;
    case Kind::reduce_scatter:
      all = reduce<T>(ranks, 0, size * n);
      if (size == 1 && any.reduction == ncclAvg) {
        all.resize(reached_by_one_rank<T>(n));
        return put(all, any);
      }
      for (size_t rank = 0; rank < size; ++rank) {
        std::memcpy(ranks[rank].to, all.data() + rank * n, n * sizeof(T));
      }
      return;
    case Kind::send:
    case Kind::receive:
      return;
  }
}

}  // namespace

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;  // the model has no other types
  }
}

void execute(const std::vector<Operation>& ranks) {
  const Turn turn(nullptr);  // NCCL's kernels have mapped what they need
  switch (ranks[0].type) {
    case ncclFloat32:
      return execute_as<float>(ranks);
    case ncclFloat64:
      return execute_as<double>(ranks);
    case ncclInt64:
      return execute_as<int64_t>(ranks);
    case ncclBfloat16:
      return execute_as<Sixteen<7>>(ranks);
    case ncclFloat16:
      return execute_as<Sixteen<10>>(ranks);
    default:
      die("NCCL: the model computes with floating-point numbers and ncclInt64 only");
  }
}

}  // namespace cuda_model::nccl
