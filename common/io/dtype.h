#pragma once
// The element types of the safetensors format.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace lockstep {

/// Element types under the names that the format gives them, whole bytes only. The order is that of
/// the reference implementation (`Dtype` in its tensor.rs): ascending alignment. The writer sorts
/// by it, so it decides the bytes of every file we write.
enum class DType : std::uint8_t {
  BOOL,
  U8,
  I8,
  F8_E5M2,
  F8_E4M3,
  F8_E8M0,
  F8_E4M3FNUZ,
  F8_E5M2FNUZ,
  I16,
  U16,
  F16,
  BF16,
  I32,
  U32,
  F32,
  C64,
  F64,
  I64,
  U64,
};

/// The name in the file: "F32".
std::string_view dtype_name(DType dtype);

/// Size of one element in bytes.
std::size_t dtype_size(DType dtype);

/// The type with that name; nothing if it is none of the above. Case matters.
std::optional<DType> dtype_from_name(std::string_view name);

/// Whether the format has a type of that name that packs several elements into a byte (F4, F6_*).
/// Lockstep does not read these.
bool is_packed_dtype(std::string_view name);

}  // namespace lockstep
