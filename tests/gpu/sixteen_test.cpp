// Operations on numbers of 16 bits on a GPU: each gives what it gives there with the same numbers
// as Real, rounded once. cuDNN and cuBLAS add products in another order for each type, which moves
// a few results to the next number of 16 bits.

#include <string>
#include <vector>

#include "tests/gpu/gpu_test_support.h"
#include "tests/support/sixteen_operations.h"

namespace lockstep {
namespace {

using namespace testing::sixteen;
using testing::random_values;
using testing::TestDevice;

/// Half a unit in the last place of bf16, which has the fewest digits. A bias that is added to a
/// rounded product rounds once more.
constexpr double kLastPlace = 1.0 / 256;

double apart(const Values& found, const Values& expected) {
  return testing::relative_l2(std::vector<double>(found.begin(), found.end()),
                              std::vector<double>(expected.begin(), expected.end()));
}

TEST_CASE("conv2d, matmul on numbers of 16 bits: as on Real numbers, rounded once",
          "[cuda][ops][sixteen][convolution][tensor-cores]") {
  LOCKSTEP_NEEDS_GPU();
  for (const bool channels_first : {false, true}) {
    const TestDevice gpu(open_device(testing::kGpu, {.nchw = channels_first}));
    for (const Operation& operation : kOperations) {
      if (!operation.by_library) continue;
      for (const Shapes& shapes : {kUneven, kEven}) {
        INFO("channels first " << channels_first << ", rows of " << shapes.rows[1]);
        each_result(gpu, operation, shapes, [&](const Values& found, const Values& expected) {
          CHECK(apart(found, expected) <= kLastPlace);
        });
      }
    }
  }
}

TEST_CASE("All operations of our own on numbers of 16 bits: as on Real numbers, rounded once",
          "[cuda][ops][sixteen]") {
  LOCKSTEP_NEEDS_GPU();
  const TestDevice gpu(open_device(testing::kGpu, {}));
  const auto same = [](const Values& found, const Values& expected) { CHECK(found == expected); };
  for (const Operation& operation : kOperations) {
    if (operation.by_library) continue;
    for (const Shapes& shapes : {kUneven, kEven}) {
      INFO("rows of " << shapes.rows[1]);
      each_result(gpu, operation, shapes, same);
    }
  }
}

TEST_CASE("conv2d_backward_parameters, matmul: a gradient of 16 bits is rounded, then added",
          "[cuda][ops][sixteen][convolution][tensor-cores]") {
  LOCKSTEP_NEEDS_GPU();
  for (const bool channels_first : {false, true}) {
    const TestDevice gpu(open_device(testing::kGpu, {.nchw = channels_first}));
    for (const Window2d& g : {testing::kernels::window(4, 8, 8, 3, 5, 3, 1, 1),
                              testing::kernels::window(3, 7, 5, 8, 16, 1, 1, 0),
                              testing::kernels::window(2, 6, 5, 8, 16, 1, 2, 0)}) {
      for (const ElementType type : {ElementType::bf16, ElementType::fp16}) {
        INFO(testing::kernels::text(g) << " in " << name_of(type));
        // [0]: from zeros in Real; [1]: from `before` in 16 bits.
        const Values before = random_values(g.weight(), 7);
        Values sums[2], bias[2];
        for (const bool sixteen : {false, true}) {
          const testing::sixteen::Trial t{gpu, sixteen ? type : kTypeOf<Real>, type, kEven};
          const Tensor dweight = sixteen ? gpu.put(g.weight(), before) : gpu.filled(g.weight(), 0);
          const Tensor dbias = gpu.filled({g.out_channels}, 0);
          t.kernels().conv2d_backward_parameters(gpu.stream, g, t.in(g.input(), 1),
                                                 t.in(g.output(), 2), dweight, dbias);
          sums[sixteen] = dweight.to_host(), bias[sixteen] = dbias.to_host();
        }
        for (size_t i = 0; i < before.size(); ++i) sums[1][i] -= before[i];
        CHECK(apart(sums[1], sums[0]) <= kLastPlace);
        CHECK(sums[1] != sums[0]);  // rounded
        CHECK(bias[1] == bias[0]);  // a sum, not a product: nothing rounds it
      }
    }
  }
}

TEST_CASE("matmul: an empty product of 16 bits is zeros, or adds nothing", "[cuda][ops][sixteen]") {
  LOCKSTEP_NEEDS_GPU();
  const TestDevice gpu(open_device(testing::kGpu, {}));
  for (const ElementType type : {ElementType::bf16, ElementType::fp16}) {
    testing::sixteen::Trial t{gpu, type, type, kEven};
    MatMul none{
        .m = 2, .n = 3, .k = 0, .transpose_a = false, .transpose_b = false, .accumulate = false};
    const AnyTensor c = t.out({2, 3});
    t.kernels().matmul(gpu.stream, none, t.in({2, 0}, 1), t.in({0, 3}, 2), c);
    CHECK(c.to_host() == Values(6, 0));
    none.accumulate = true;
    const Tensor sum = gpu.filled({2, 3}, 5);
    t.kernels().matmul(gpu.stream, none, t.in({2, 0}, 1), t.in({0, 3}, 2), sum);
    CHECK(sum.to_host() == Values(6, 5));
  }
}

}  // namespace
}  // namespace lockstep
