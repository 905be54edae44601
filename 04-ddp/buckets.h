#pragma once
// Which gradients are reduced together.

#include <cstdint>
#include <vector>

#include "common/nn/parameter.h"

namespace lockstep {

/// How large buckets become. Mirrors torch.nn.parallel.DistributedDataParallel: the first one is
/// small, so that the first all-reduce starts early.
struct BucketCaps {
  int64_t first_bytes = int64_t{1} << 20;
  int64_t bytes = int64_t{25} << 20;

  /// The same cap for all, as bucket_cap_mb gives; 0: every gradient by itself.
  static BucketCaps equal(double megabytes);
};

/// Parameters whose gradients lie side by side.
struct Bucket {
  std::vector<size_t> parameters{};  // their places in the order of completion, rising
  int64_t bytes = 0;                 // of their gradients
  friend bool operator==(const Bucket&, const Bucket&) = default;
};

/// Puts gradients, given by their bytes in the order in which backward completes them, into
/// buckets. A bucket is closed when it has reached its cap, so it may be larger. They
/// are a function of the sizes alone, and so the same on all ranks; unlike PyTorch's they are never
/// made anew.
std::vector<Bucket> make_buckets(const std::vector<int64_t>& bytes, const BucketCaps& caps);

}  // namespace lockstep
