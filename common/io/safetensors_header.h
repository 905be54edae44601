#pragma once
// The header of a safetensors file: what the reader and the writer share. Not for use outside
// common/io.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/io/checksums.h"
#include "common/io/safetensors.h"

namespace lockstep::safetensors {

inline constexpr std::size_t kLengthBytes = 8;          // the header's length, before the header
inline constexpr std::size_t kMaxHeader = 100'000'000;  // bytes, as in the reference reader
inline constexpr std::size_t kAlignment = 8;            // of the first tensor, in the file
inline constexpr const char* kMetadataKey = "__metadata__";
/// How many of a file's first bytes tell other formats: where tar has its mark ends before.
inline constexpr std::size_t kTellingBytes = 512;

/// Bytes of a tensor of that shape; nothing if the number does not fit in 64 bits. Like the
/// reference, from left to right: [2^62, 4, 0] overflows although it is empty.
/// Dimensions must not be negative.
std::optional<std::uint64_t> tensor_bytes(std::span<const std::int64_t> shape, DType dtype);

/// Rules 1 to 3 of parse_safetensors(): N, from the `first` bytes of a file of `size` bytes, as
/// many of them as there are up to kTellingBytes. A file of another format, which users give where
/// safetensors are expected, is refused with what it is and how to make safetensors of it.
std::size_t header_length(std::span<const std::byte> first, std::uint64_t size,
                          const std::string& what);

/// A header whose content obeys the format.
struct Header {
  std::vector<StoredTensor> tensors{};  // in the order of their bytes
  Metadata metadata{};                  // without the checksums
  FileChecksums checksums{};
};

/// Rules 4 to 9 of parse_safetensors(), but for the tensors' checksums: of a file of `size` bytes
/// that begins with `header`, the length before it included.
Header read_header(std::span<const std::byte> header, std::uint64_t size, const std::string& what);

}  // namespace lockstep::safetensors
