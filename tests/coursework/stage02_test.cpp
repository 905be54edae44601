// Grades stage 02.

#include "common/data/batch_parts.h"
#include "tests/coursework/hint.h"

namespace lockstep {
namespace {

using Numbers = std::vector<int64_t>;

Numbers sizes_of(const std::vector<BatchPart>& parts) {
  Numbers sizes;
  for (const BatchPart& part : parts) sizes.push_back(part.count);
  return sizes;
}

Numbers begins_of(const std::vector<BatchPart>& parts) {
  Numbers begins;
  for (const BatchPart& part : parts) begins.push_back(part.first);
  return begins;
}

TEST_CASE("A batch that divides evenly gives equal chunks", "[task02.1]") {
  const std::vector<BatchPart> parts = chunk_parts(8, 2);
  HINT("8 samples for 2 devices: is a size rounded up that needs no rounding?");
  CHECK(sizes_of(parts) == Numbers{4, 4});
  {
    HINT("a chunk begins where the one before it ends");
    CHECK(begins_of(parts) == Numbers{0, 4});
  }
  for (const BatchPart& part : parts) {
    HINT("a chunk's samples lie side by side");
    CHECK(part.stride == 1);
  }
}

TEST_CASE("The last chunk has what is left", "[task02.1]") {
  const std::vector<BatchPart> parts = chunk_parts(10, 4);
  int64_t samples = 0;
  for (const BatchPart& part : parts) samples += part.count;
  {
    HINT(
        "every sample is in one chunk: is the size rounded the right way, does the last one end "
        "with the batch?");
    CHECK(samples == 10);
  }
  HINT("torch.chunk does not even its chunks out: all but the last have the same size");
  CHECK(sizes_of(parts) == Numbers{3, 3, 3, 1});
  CHECK(begins_of(parts) == Numbers{0, 3, 6, 9});
}

TEST_CASE("There may be fewer chunks than devices, but none is empty", "[task02.1]") {
  HINT("when nothing is left there are no more chunks: some devices have nothing to do");
  CHECK(sizes_of(chunk_parts(6, 4)) == Numbers{2, 2, 2});
  CHECK(sizes_of(chunk_parts(2, 3)) == Numbers{1, 1});
}

}  // namespace
}  // namespace lockstep
