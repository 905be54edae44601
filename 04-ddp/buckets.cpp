#include "04-ddp/buckets.h"

#include <algorithm>

#include "common/core/error.h"

namespace lockstep {

BucketCaps BucketCaps::equal(double megabytes) {
  require(megabytes >= 0, "--bucket-mb: {}, expected 0 (every gradient by itself) or more",
          megabytes);
  const auto bytes = static_cast<int64_t>(std::min(megabytes, 1e9) * (1 << 20));
  return {bytes, bytes};
}

std::vector<Bucket> make_buckets(const std::vector<int64_t>& bytes, const BucketCaps& caps) {
  // [task 04.2] buckets
  std::vector<Bucket> buckets;
  bool closed = true;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (closed) buckets.emplace_back();
    Bucket& bucket = buckets.back();
    bucket.parameters.push_back(i);
    bucket.bytes += bytes[i];
    closed = bucket.bytes >= (buckets.size() == 1 ? caps.first_bytes : caps.bytes);
  }
  return buckets;
  // [end 04.2]
}

}  // namespace lockstep
