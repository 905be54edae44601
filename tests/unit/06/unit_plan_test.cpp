// Which layers are gathered together.

#include "06-fully-sharded/unit_plan.h"

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Counts = std::vector<size_t>;
using Catch::Matchers::ContainsSubstring;

const std::vector<PlannedLayer> kLayers{{"conv1", 1000},   {"pool1", 0},      {"block1.0", 400},
                                        {"block1.1", 400}, {"gap", 0},        {"flatten", 0},
                                        {"fc", 5000},      {"log_softmax", 0}};

TEST_CASE("Units are layers, blocks, all, or as many as reach a size", "[sharded][units]") {
  CHECK(plan_units(kLayers, UnitSize::from("layer")) == Counts{2, 1, 3, 2});
  CHECK(plan_units(kLayers, UnitSize::from("block")) == Counts{2, 4, 2});
  CHECK(plan_units(kLayers, UnitSize::from("model")) == Counts{8});
  CHECK(plan_units(kLayers, {UnitSize::Kind::bytes, 1400}) == Counts{3, 5});
  CHECK(plan_units(kLayers, {UnitSize::Kind::bytes, 1401}) == Counts{6, 2});
  CHECK(plan_units(kLayers, UnitSize::from("0.000001")) ==
        plan_units(kLayers, UnitSize::from("layer")));
  CHECK(plan_units(kLayers, UnitSize::from("25")) == Counts{8});
  for (const std::string text : {"layer", "block", "model", "25", "0.5"}) {
    CHECK(UnitSize::from(text).text() == text);
  }
}

TEST_CASE("Layers without parameters belong to a unit that has some", "[sharded][units]") {
  CHECK(plan_units({{"flatten", 0}, {"fc1", 8}, {"relu", 0}, {"fc2", 8}},
                   UnitSize::from("layer")) == Counts{3, 1});
  CHECK(plan_units({{"flatten", 0}, {"relu", 0}}, UnitSize::from("layer")) == Counts{2});
  CHECK(plan_units({}, UnitSize::from("layer")).empty());
}

TEST_CASE("What is no unit is refused in one line", "[sharded][units][faults]") {
  for (const std::string text : {"", "layers", "0", "-1", "25MB", "nan", "inf", "1e7"}) {
    INFO(text);
    CHECK_THAT(
        testing::message_of<BadInput>([&] { UnitSize::from(text); }),
        ContainsSubstring("--unit: found '" + text + "', expected layer, block, model, or MiB"));
  }
}

}  // namespace
}  // namespace lockstep
