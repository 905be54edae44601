// Which elements packs.cuh moves in packs: each element once, and as many in packs as can be; and
// how much of a sum over rows one block is left with. An operation is right in any case, so only
// this program sees these. The nvcc of tests/cuda_model compiles it
// (tests/tools/test_gpu_packs.py).

#include <cstdio>
#include <vector>

#include "common/kernels/cuda/launch.cuh"
// After it, for both processors.
#include "common/kernels/bodies/elementwise.inl"

using namespace lockstep;

namespace {

int failures = 0;

void expect(bool holds, const char* what, const char* body, int64_t n, const char* where) {
  if (holds) return;
  std::printf("%s, %lld elements, %s: %s\n", body, static_cast<long long>(n), where, what);
  ++failures;
}

/// Every element of [0, n) once: alone, or in a pack that begins where packs may.
template <class Body>
bool is_whole(const cuda::Split<Body>& at, int64_t n, const Body& body) {
  constexpr int kSize = cuda::kPackSize<Body>;
  std::vector<int> seen(size_t(n), 0);
  const auto see = [&](int64_t i) {
    if (i < 0 || i >= n) return false;
    return ++seen[size_t(i)] == 1;
  };
  bool once = true;
  for (int64_t k = 0; k < at.alone(); ++k) once = see(at.element(k)) && once;
  for (int64_t pack = 0; pack < at.packs; ++pack) {
    const int64_t first = at.first_of(pack);
    once = once && cuda::packs_begin_at<kSize>(first, body, typename Body::Arrays());
    for (int64_t k = 0; k < kSize; ++k) once = see(first + k) && once;
  }
  for (const int times : seen) once = once && times == 1;
  return once;
}

/// The arrays begin x and y elements after a place where packs of both may begin.
template <class Body>
void check(const char* name, int64_t n, int64_t x, int64_t y, const Body& body) {
  constexpr int kSize = cuda::kPackSize<Body>;
  char where[64];
  std::snprintf(where, sizeof where, "arrays begin at %d and %d", int(x), int(y));
  const cuda::Split<Body> at = cuda::split(n, body);
  expect(is_whole(at, n, body), "not each element once, in packs that may begin there", name, n,
         where);
  const int64_t head = (kSize - x % kSize) % kSize;
  const bool meet = (y + head) % 4 == 0;  // y's elements are floats: four in 16 bytes
  const int64_t packs = meet && n > head ? (n - head) / kSize : 0;
  expect(at.packs == packs, "not as many packs as can be", name, n, where);
}

/// Rows of `features` numbers of which y begins `rows` and a bias `bias` elements after a place
/// where packs of both may begin.
void check_rows(int64_t features, int64_t rows, int64_t bias, const bodies::AddBias<float>& body) {
  constexpr int kSize = cuda::kPackSize<bodies::AddBias<float>>;
  const bool found = cuda::rows_are_packs<kSize>(3, features, body);
  const bool expected = features % kSize == 0 && rows % kSize == 0 && bias % kSize == 0;
  char where[64];
  std::snprintf(where, sizeof where, "rows begin at %d, the bias at %d", int(rows), int(bias));
  expect(found == expected, found ? "in packs" : "not in packs", "AddBias", features, where);
}

/// A sum over rows ends with one block's work, while the other blocks have ended: what that block
/// reads of their sums is at most 200 KiB, whatever the shape.
template <int kSize>
void check_last_block(int64_t rows, int64_t channels) {
  const cuda::ColumnGrid<kSize> at(rows, channels);
  const int64_t width = kSize * int64_t(at.block.x);
  const int64_t bytes = at.grid.y * width * int64_t(sizeof(cuda::ColumnSums));
  expect(at.grid.x * width >= channels, "channels are left out", "sum", channels, "columns");
  expect(bytes <= 200 * 1024, "its last block reads too much", "sum", channels, "columns");
}

}  // namespace

int main() {
  alignas(64) static float wide[256], more[256];
  alignas(64) static uint8_t bytes[256];
  for (int64_t n = 0; n <= 70; ++n) {
    for (int64_t x = 0; x < 17; ++x) {
      for (int64_t y = 0; y < 17; ++y) {
        check("Add", n, x, y, bodies::Add<float, float>{wide + x, more + y});
        check("NormalizeImage", n, x, y, bodies::NormalizeImage<float>{bytes + x, 0, 1, wide + y});
      }
    }
  }
  for (int64_t features = 1; features <= 20; ++features) {
    for (int64_t rows = 0; rows < 5; ++rows) {
      for (int64_t bias = 0; bias < 5; ++bias) {
        check_rows(features, rows, bias, {more + bias, false, wide + rows});
      }
    }
  }
  for (int64_t rows : {1, 4096, 12544, 50176, 200704, 10000000}) {
    for (int64_t channels : {4, 20, 64, 128, 256, 512, 4096}) {
      check_last_block<4>(rows, channels);
      check_last_block<1>(rows, channels + 1);
    }
  }
  std::printf("%d wrong\n", failures);
  return failures > 0;
}
