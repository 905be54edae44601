#include "common/io/dtype.h"

#include <algorithm>
#include <array>

namespace lockstep {
namespace {

struct Row {
  DType dtype;
  std::string_view name;
  std::size_t size;  // bytes
};

constexpr std::array kRows = {
    Row{DType::BOOL, "BOOL", 1},
    Row{DType::U8, "U8", 1},
    Row{DType::I8, "I8", 1},
    Row{DType::F8_E5M2, "F8_E5M2", 1},
    Row{DType::F8_E4M3, "F8_E4M3", 1},
    Row{DType::F8_E8M0, "F8_E8M0", 1},
    Row{DType::F8_E4M3FNUZ, "F8_E4M3FNUZ", 1},
    Row{DType::F8_E5M2FNUZ, "F8_E5M2FNUZ", 1},
    Row{DType::I16, "I16", 2},
    Row{DType::U16, "U16", 2},
    Row{DType::F16, "F16", 2},
    Row{DType::BF16, "BF16", 2},
    Row{DType::I32, "I32", 4},
    Row{DType::U32, "U32", 4},
    Row{DType::F32, "F32", 4},
    Row{DType::C64, "C64", 8},
    Row{DType::F64, "F64", 8},
    Row{DType::I64, "I64", 8},
    Row{DType::U64, "U64", 8},
};

// Rows are found by index, so each must be at its enumerator's place.
constexpr bool rows_follow_the_enum() {
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    if (static_cast<std::size_t>(kRows[i].dtype) != i) return false;
  }
  return kRows.size() == static_cast<std::size_t>(DType::U64) + 1;
}
static_assert(rows_follow_the_enum());

const Row& row(DType dtype) { return kRows.at(static_cast<std::size_t>(dtype)); }

}  // namespace

std::string_view dtype_name(DType dtype) { return row(dtype).name; }

std::size_t dtype_size(DType dtype) { return row(dtype).size; }

std::optional<DType> dtype_from_name(std::string_view name) {
  const auto found = std::ranges::find(kRows, name, &Row::name);
  if (found == kRows.end()) return std::nullopt;
  return found->dtype;
}

bool is_packed_dtype(std::string_view name) {
  return name == "F4" || name == "F6_E2M3" || name == "F6_E3M2";
}

}  // namespace lockstep
