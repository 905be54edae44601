// Grades stage 05.

#include "tests/coursework/hint.h"
#include "tests/unit/nn_test_support.h"

namespace lockstep {
namespace {

/// Statistics of one channel: of a part, or of the whole batch.
struct Statistics {
  double mean, m2, rows;
};

/// The merge of parts, by the kernel.
Statistics merged(const std::vector<Statistics>& parts) {
  const testing::TestDevice device;
  std::vector<Real> gathered;
  for (const Statistics& part : parts) {
    for (const double value : {part.mean, part.m2, part.rows}) gathered.push_back(Real(value));
  }
  const Tensor whole = device.filled({3}, -1);
  device.kernels().batch_norm_merge(
      device.stream, device.put({static_cast<int64_t>(parts.size()), 3}, gathered), whole);
  const std::vector<Real> found = whole.to_host();
  return {double(found[0]), double(found[1]), double(found[2])};
}

TEST_CASE("Two parts of the same size", "[task05.1]") {
  // 0 2 | 4 6
  const Statistics whole = merged({{1, 2, 2}, {5, 2, 2}});
  {
    HINT("the mean of 0, 2, 4 and 6");
    CHECK(whole.mean == Approx(3));
  }
  {
    HINT("how many rows have both parts together?");
    CHECK(whole.rows == 4);
  }
  HINT(
      "M2 is the sum of squared distances to the mean of all: the distance between the parts' "
      "means is in it, too");
  CHECK(whole.m2 == Approx(20));
}

TEST_CASE("Parts of different sizes", "[task05.1]") {
  // 10 | 1 2 3
  const Statistics whole = merged({{10, 0, 1}, {2, 2, 3}});
  {
    HINT("a part counts by its rows: the average of averages is another number");
    CHECK(whole.mean == Approx(4));
  }
  HINT("by how much does the distance of the means count, if one part has more rows?");
  CHECK(whole.m2 == Approx(50));
}

TEST_CASE("Three parts, one of them a rank without samples", "[task05.1]") {
  // nothing | 1 3 | 5
  const Statistics whole = merged({{0, 0, 0}, {2, 2, 2}, {5, 0, 1}});
  HINT("a rank may have no rows: does anything divide by them, or does its mean of 0 count?");
  CHECK(whole.mean == Approx(3));
  CHECK(whole.m2 == Approx(8));
  CHECK(whole.rows == 3);
  HINT("no rows at all are no reason for NaN");
  CHECK(merged({{0, 0, 0}, {0, 0, 0}}).mean == 0);
}

TEST_CASE("A large mean keeps the digits of a small spread", "[task05.1]") {
  // 99999 100001 | 100001 100003
  const Statistics whole = merged({{100000, 2, 2}, {100002, 2, 2}});
  HINT("a square of a mean is a large number: what is left after subtracting another?");
  CHECK(whole.m2 == Approx(8).epsilon(1e-5));
  CHECK(whole.mean == Approx(100001));
}

}  // namespace
}  // namespace lockstep
