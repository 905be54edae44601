#pragma once
// Which rank keeps which numbers, and how another number of ranks reads the shards of W ranks.
// Nothing here knows of devices, messages or files.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

/// Numbers [first, first + count) of something that lies in memory one after another.
struct FlatRange {
  int64_t first = 0, count = 0;
  int64_t end() const { return first + count; }
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
};

/// The length that a flat buffer of `elements` numbers needs. Its `world_size` shards are then
/// equally long and each begins at a multiple of 64 bytes. The added numbers are zeros.
int64_t padded_length(int64_t elements, int world_size);

/// Rank `rank`'s shard of a flat buffer of `length` numbers, which world_size divides: the ranks'
/// shards follow each other and have the same length. They are cut without regard to parameters: a
/// parameter may lie on several ranks. Mirrors torch.distributed.fsdp's FlatParameter.
FlatRange shard_of(int64_t length, int rank, int world_size);

/// A part of a parameter that lies in one shard.
struct Piece {
  std::size_t parameter = 0;  // its place in the list of parameters
  FlatRange of_parameter{};   // these of its elements
  int64_t in_shard = 0;       // where they begin in the shard
  friend bool operator==(const Piece&, const Piece&) = default;
};

/// The pieces of the parameters in a shard, in the order of the list. `parameters` says where each
/// one lies in the flat buffer. A parameter outside the shard has no piece; nor has padding.
std::vector<Piece> pieces_in(const std::vector<FlatRange>& parameters, FlatRange shard);

/// A part of a saved piece of a parameter, and where it goes in the piece that is wanted.
struct Extract {
  size_t saved = 0;       // which of the saved pieces
  FlatRange of_saved{};   // these of its elements, counted from its first one
  int64_t in_wanted = 0;  // where the first of them goes, from the first one
  friend bool operator==(const Extract&, const Extract&) = default;
};

/// The extracts to read for the elements `wanted` of a parameter. File i has the elements
/// `saved[i]`. The saved pieces are in any order, and some may be empty. The extracts follow each
/// other as the wanted elements do. None is empty, and none has an element that is not wanted.
/// Throws BadInput, with the first such element, if a wanted element is in no saved piece or in
/// two.
std::vector<Extract> join_shards(const std::vector<FlatRange>& saved, FlatRange wanted);

}  // namespace lockstep
