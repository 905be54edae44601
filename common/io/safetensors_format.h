#pragma once
// What the reader and the writer of safetensors share. Not for use outside common/io.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "common/io/dtype.h"

namespace lockstep::safetensors {

inline constexpr std::size_t kLengthBytes = 8;          // the header's length, before the header
inline constexpr std::size_t kMaxHeader = 100'000'000;  // bytes, as in the reference reader
inline constexpr std::size_t kAlignment = 8;            // of the first tensor, in the file
inline constexpr const char* kMetadataKey = "__metadata__";

/// The first `limit` bytes of `text`, always valid UTF-8 (ill-formed bytes become '?'): whatever is
/// in a file must neither flood an error message nor garble it.
std::string clipped(std::string_view text, std::size_t limit = 80);

/// `text` clipped, as a JSON string, so that it stays on one line whatever it contains.
std::string in_quotes(std::string_view text);

/// Bytes of a tensor of that shape; nothing if the number does not fit in 64 bits. Like the
/// reference, from left to right: [2^62, 4, 0] overflows although it is empty.
/// Dimensions must not be negative.
std::optional<std::uint64_t> tensor_bytes(std::span<const std::int64_t> shape, DType dtype);

}  // namespace lockstep::safetensors
