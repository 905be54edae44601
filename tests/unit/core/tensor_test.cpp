// Shapes, and tensors that are views of another one's memory.

#include <vector>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/unit/core/core_test_support.h"

namespace lockstep {
namespace {

using namespace testing::core;
using testing::message_of;

}  // namespace

// --- Shapes and tensors --------------------------------------------------------------------------

TEST_CASE("A shape has a text, elements and elements of a row", "[core]") {
  CHECK(Shape{64, 28, 28, 1}.text() == "[64, 28, 28, 1]");
  CHECK(Shape{64, 28, 28, 3}.elements() == 64 * 28 * 28 * 3);
  CHECK(Shape{64, 28, 28, 3}.row_elements() == 28 * 28 * 3);
  CHECK(Shape{0, 28, 28, 3}.row_elements() == 28 * 28 * 3);
  CHECK(Shape{7}.text() == "[7]");
  CHECK(Shape{7}.row_elements() == 1);
  CHECK(Shape{}.text() == "[]");
  CHECK(Shape{}.elements() == 1);
  CHECK(Shape{}.row_elements() == 1);
  CHECK(Shape{0, 5}.elements() == 0);
  CHECK(Shape{2, 3} == Shape(std::vector<int64_t>{2, 3}));
  CHECK_FALSE(Shape{2, 3} == Shape{3, 2});
}

TEST_CASE("A shape that memory cannot have is refused, not counted wrongly", "[core]") {
  constexpr int64_t k2_62 = int64_t{1} << 62;
  for (const Shape& shape : {Shape{k2_62, 2}, Shape{k2_62, 4, 1, 1},
                             Shape{1L << 32, 1L << 32, 1, 1}, Shape{1L << 32, 1L << 29, 8, 1},
                             Shape{0, k2_62, 4}, Shape{-1, -2}, Shape{3, -1}, Shape{-1}}) {
    INFO(shape.text());
    CHECK_THAT(message_of<BadInput>([&] { shape.elements(); }),
               Catch::Matchers::StartsWith("shape " + shape.text() + ": found "));
  }
  CHECK_THROWS_AS((Shape{7, k2_62, 4}.row_elements()), BadInput);
  CHECK(Shape{k2_62, 1}.elements() == k2_62);
  CHECK(Shape{k2_62, 0}.elements() == 0);
  CHECK(Shape{k2_62}.bytes(1) == size_t(k2_62));
  CHECK_THROWS_AS(Shape{k2_62}.bytes(4), BadInput);  // would be 0
  Setup s;
  CHECK_THROWS_AS(Tensor::empty(s.stream, {k2_62}), BadInput);
  CHECK_THROWS_AS(counting(s.stream, {4}).range(INT64_MAX, {2}), BadInput);
  CHECK(Shape(std::vector<int64_t>(1000, 1)).text() ==
        "[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, ... and 990 more]");
}

TEST_CASE("Views of a tensor share its memory", "[core]") {
  Setup s;
  const Tensor whole = counting(s.stream, {4, 3});
  const int64_t in_use = s.device->memory().current();
  const Tensor rows = whole.rows(1, 2), range = whole.range(5, {2, 2});
  const Tensor inner = whole.rows(1, 3).rows(1, 2).range(1, {3});  // offsets add up
  const Tensor reshaped = whole.reshaped({2, 6});
  CHECK(s.device->memory().current() == in_use);
  CHECK(rows.shape() == Shape{2, 3});
  CHECK(reshaped.shape() == Shape{2, 6});
  CHECK(rows.to_host() == std::vector<Real>{3, 4, 5, 6, 7, 8});
  CHECK(range.to_host() == std::vector<Real>{5, 6, 7, 8});
  CHECK(inner.to_host() == std::vector<Real>{7, 8, 9});
  CHECK(whole.rows(4, 0).to_host().empty());

  range.copy_from_host({50, 60, 70, 80});
  CHECK(reshaped.to_host() == std::vector<Real>{0, 1, 2, 3, 4, 50, 60, 70, 80, 9, 10, 11});
}

TEST_CASE("A view keeps the memory alive, and the last one lets it go", "[core]") {
  Setup s;
  Tensor view;
  CHECK_FALSE(view.defined());
  {
    const Tensor whole = counting(s.stream, {4, 3});
    view = whole.rows(3, 1);
  }
  CHECK(view.to_host() == std::vector<Real>{9, 10, 11});
  CHECK(s.device->memory().current() == static_cast<int64_t>(12 * sizeof(Real)));
  view = Tensor();
  CHECK(s.device->memory().current() == 0);
}

TEST_CASE("A view that does not fit is refused with both shapes", "[core]") {
  Setup s;
  const Tensor x = counting(s.stream, {2, 3});
  const Shape eight{4, 2};
  const std::vector<Real> two{1, 2}, three{1, 2, 3};
  CHECK(message_of<BadInput>([&] { x.reshaped(eight); }) ==
        "elements after reshaping [2, 3]: found 8, expected 6");
  CHECK(message_of<BadInput>([&] { x.rows(1, 2); }) ==
        "rows 1 to 3 are not in a tensor of shape [2, 3]");
  CHECK(message_of<BadInput>([&] { x.rows(-1, 1); }) ==
        "rows -1 to 0 are not in a tensor of shape [2, 3]");
  CHECK(message_of<BadInput>([&] { x.rows(1, -1); }) ==
        "rows 1 to 0 are not in a tensor of shape [2, 3]");
  CHECK(message_of<BadInput>([&] { x.range(4, {3}); }) ==
        "elements 4 to 7 are not in a tensor of shape [2, 3]");
  CHECK(message_of<BadInput>([&] { x.range(-1, {3}); }) ==
        "elements -1 to 2 are not in a tensor of shape [2, 3]");
  CHECK(message_of<BadInput>([&] { x.copy_from_host(three); }) ==
        "values for a tensor of shape [2, 3]: found 3, expected 6");
  CHECK(message_of<BadInput>([&] { Tensor::from_host(s.stream, x.shape(), two); }) ==
        "values for a tensor of shape [2, 3]: found 2, expected 6");
  CHECK(x.to_host() == std::vector<Real>{0, 1, 2, 3, 4, 5});
}

}  // namespace lockstep
