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

  /// The same cap for all buckets, as bucket_cap_mb gives. 0: each gradient has its own bucket.
  static BucketCaps equal(double megabytes);
};

/// Parameters whose gradients lie side by side.
struct Bucket {
  std::vector<size_t> parameters{};  // their places in the order of completion, rising
  int64_t bytes = 0;                 // of their gradients
  friend bool operator==(const Bucket&, const Bucket&) = default;
};

/// Puts gradients into buckets. `bytes` has their sizes, in the order in which backward completes
/// them. A bucket is closed when it has reached its cap, so it may be larger than the cap. Buckets
/// depend on the sizes alone, so they are the same on all ranks; unlike PyTorch's they never
/// change.
std::vector<Bucket> make_buckets(const std::vector<int64_t>& bytes, const BucketCaps& caps);

}  // namespace lockstep
