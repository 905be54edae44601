#pragma once
// How a ring divides the message that goes round it.

#include <cstdint>

namespace lockstep {

/// Numbers `first` to `first + count - 1` of a message.
struct RingPart {
  int64_t first, count;
};

/// Part `number` of a message of `count` numbers, cut into `world_size` parts of nearly equal
/// length, one per rank. Parts are counted round the ring: number -1 is the last one.
inline RingPart ring_part(int64_t count, int number, int world_size) {
  const int64_t place = ((number % world_size) + world_size) % world_size;
  const int64_t first = count * place / world_size;
  return {first, count * (place + 1) / world_size - first};
}

}  // namespace lockstep
