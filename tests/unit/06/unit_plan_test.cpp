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
  CHECK(plan_units(kLayers, parse_unit("layer")) == Counts{2, 1, 3, 2});
  CHECK(plan_units(kLayers, parse_unit("block")) == Counts{2, 4, 2});
  CHECK(plan_units(kLayers, parse_unit("model")) == Counts{8});
  CHECK(plan_units(kLayers, {UnitSize::Kind::bytes, 1400}) == Counts{3, 5});
  CHECK(plan_units(kLayers, {UnitSize::Kind::bytes, 1401}) == Counts{6, 2});
  CHECK(plan_units(kLayers, parse_unit("0.000001")) == plan_units(kLayers, parse_unit("layer")));
  CHECK(plan_units(kLayers, parse_unit("25")) == Counts{8});
}

TEST_CASE("Layers without parameters belong to a unit that has some", "[sharded][units]") {
  CHECK(plan_units({{"flatten", 0}, {"fc1", 8}, {"relu", 0}, {"fc2", 8}}, parse_unit("layer")) ==
        Counts{3, 1});
  CHECK(plan_units({{"flatten", 0}, {"relu", 0}}, parse_unit("layer")) == Counts{2});
  CHECK(plan_units({}, parse_unit("layer")).empty());
}

TEST_CASE("What is no unit is refused in one line", "[sharded][units][faults]") {
  for (const std::string text : {"", "layers", "0", "-1", "25MB", "nan", "inf", "1e7"}) {
    INFO(text);
    CHECK_THAT(testing::message_of<BadInput>([&] { parse_unit(text); }),
               ContainsSubstring("--unit: '" + text + "', expected layer, block, model, or MiB"));
  }
}

}  // namespace
}  // namespace lockstep
