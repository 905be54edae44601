#include "common/comm/call.h"

#include <fmt/format.h>

namespace lockstep {
namespace {

using Op = Call::Op;

}  // namespace

const char* name_of(Call::Op op) {
  switch (op) {
    case Op::all_reduce:
      return "all_reduce";
    case Op::broadcast:
      return "broadcast";
    case Op::all_gather:
      return "all_gather";
    case Op::reduce_scatter:
      return "reduce_scatter";
    case Op::reduce:
      return "reduce";
    case Op::send:
      return "send";
    case Op::receive:
      return "receive";
    case Op::barrier:
      return "barrier";
  }
  return "?";
}

int64_t size_of(ElementType type) { return type == ElementType::f32 ? 4 : 8; }

const char* name_of(ElementType type) {
  return type == ElementType::f32 ? "f32" : type == ElementType::f64 ? "f64" : "i64";
}

Elements Elements::part(int64_t first, int64_t part_count) const {
  return {static_cast<char*>(data) + first * size_of(type), part_count, type, device};
}

bool Call::reduces() const {
  return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter;
}

std::string Call::text() const {
  std::string text = name_of(op);
  if (op != Op::barrier) text += fmt::format(" of {} {}", mine.count, name_of(mine.type));
  if (reduces()) text += reduction == Reduction::sum ? ", sum" : ", average";
  if (op == Op::broadcast || op == Op::reduce) text += fmt::format(", root {}", peer);
  if (op == Op::send) text += fmt::format(" to rank {}", peer);
  if (op == Op::receive) text += fmt::format(" from rank {}", peer);
  if (!label.empty()) text += " for " + label;
  return text;
}

uint64_t Call::number() const {
  uint64_t number = uint64_t(mine.count);
  for (const int part : {int(op), int(mine.type), int(reduction), peer}) {
    number = number << 5 | uint64_t(part & 31);
  }
  return number;
}

int64_t Call::ring_bytes(int rank, int world_size) const {
  const int64_t others = world_size - 1, bytes = size_of(mine.type), n = mine.count;
  const int64_t own = ring_part(n, rank, world_size).count,
                right = ring_part(n, rank + 1, world_size).count;
  switch (op) {
    case Op::all_reduce:  // all parts but its own, then all but its right neighbour's
      return (2 * n - own - right) * bytes;
    case Op::reduce:  // all parts but its own; then its own, added up, to the root
      return (n - own + (rank == peer ? 0 : own)) * bytes;
    case Op::all_gather:
    case Op::reduce_scatter:
      return others * n * bytes;
    case Op::broadcast:  // from the root on, up to its left neighbour
      return (rank + 1) % world_size == peer ? 0 : n * bytes;
    case Op::send:
      return n * bytes;
    case Op::receive:
    case Op::barrier:
      return 0;
  }
  return 0;
}

}  // namespace lockstep
