#pragma once
// What the files of a sharded checkpoint say of its shards, as JSON in their free text.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/nn/state_dict.h"

namespace lockstep {

/// The name of the parameters themselves, beside "momentum", "exp_avg" and "exp_avg_sq".
inline constexpr const char* kValues = "value";

/// Whose shard a file holds.
struct ShardPlace {
  int64_t steps = 0;
  int rank = 0, world_size = 1;
  friend bool operator==(const ShardPlace&, const ShardPlace&) = default;
};

/// What a shard says of itself.
struct ShardText {
  ShardPlace place{};
  std::map<std::string, int64_t>
      first{};  // the element of each parameter that its piece begins with

  std::string to_json() const;
  /// Throws BadInput, naming `what`, for text that is not what to_json() makes.
  static ShardText from_json(const std::string& text, const std::string& what);
};

/// What the checkpoint's own file says of the shards.
struct ShardIndex {
  std::vector<std::string> checksums{};   // of the shards, by rank
  std::vector<std::string> states{};      // "value" first
  std::vector<StateTensor> parameters{};  // names and PyTorch's shapes, no values
  std::map<std::string, double> steps{};  // of each parameter, for steps_of(); empty for SGD

  std::string to_json() const;
  /// Throws BadInput, naming `what`, for text that is not what to_json() makes: a state that is
  /// listed twice, extents that are no whole numbers from 1 on, or a shape whose elements nothing
  /// can count.
  static ShardIndex from_json(const std::string& text, const std::string& what);
};

}  // namespace lockstep
