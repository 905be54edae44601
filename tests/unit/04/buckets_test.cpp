// Which gradients are reduced together.

#include "04-ddp/buckets.h"

#include <numeric>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Sizes = std::vector<int64_t>;

Sizes bytes_of(const std::vector<Bucket>& buckets) {
  Sizes all;
  for (const Bucket& bucket : buckets) all.push_back(bucket.bytes);
  return all;
}

TEST_CASE("Buckets are PyTorch's", "[ddp][buckets][row78]") {
  const Sizes layers(16, (4 << 20) + (4 << 10));  // 16 gradients of 4 MiB + 4 KiB
  CHECK(bytes_of(make_buckets(layers, {})) == Sizes{4198400, 29388800, 29388800, 4198400});
  // A cap that is given counts for the first bucket, too.
  CHECK(bytes_of(make_buckets(layers, BucketCaps::equal(25))) ==
        Sizes{29388800, 29388800, 2 * 4198400});
  // One gradient larger than the cap, and small ones around it.
  CHECK(bytes_of(make_buckets({100, 50 << 20, 100, 200}, BucketCaps::equal(1))) ==
        Sizes{100 + (50 << 20), 300});
  CHECK(bytes_of(make_buckets({4, 4, 4}, {})) == Sizes{12});
  CHECK(make_buckets({}, {}).empty());
}

TEST_CASE("A cap of 0 puts every gradient into a bucket of its own", "[ddp][buckets]") {
  CHECK(bytes_of(make_buckets({8, 0, 16}, BucketCaps::equal(0))) == Sizes{8, 0, 16});
  CHECK_THAT(testing::message_of<BadInput>([] { BucketCaps::equal(-1); }),
             Catch::Matchers::ContainsSubstring("--bucket-mb: -1"));
  CHECK(bytes_of(make_buckets({8, 16}, BucketCaps::equal(1e300))) == Sizes{24});
}

TEST_CASE("Every gradient is in one bucket, in the order of completion", "[ddp][buckets]") {
  for (const double megabytes : {0.0, 1e-5, 1e-4, 0.1, 1.0}) {
    Sizes sizes;
    for (int i = 0; i < 40; ++i) sizes.push_back(i * 7919 % 211);
    std::vector<size_t> seen;
    for (const Bucket& bucket : make_buckets(sizes, BucketCaps::equal(megabytes))) {
      int64_t sum = 0;
      for (const size_t i : bucket.parameters) sum += sizes[i];
      CHECK(bucket.bytes == sum);
      seen.insert(seen.end(), bucket.parameters.begin(), bucket.parameters.end());
    }
    std::vector<size_t> expected(sizes.size());
    std::iota(expected.begin(), expected.end(), size_t{0});
    CHECK(seen == expected);
  }
}

}  // namespace
}  // namespace lockstep
