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
/// The number of a file's first bytes that tell other formats: tar has its mark within them.
inline constexpr std::size_t kTellingBytes = 512;

/// Bytes of a tensor of that shape; nothing if the number does not fit in 64 bits. Like the
/// reference, from left to right: [2^62, 4, 0] overflows although it is empty.
/// Dimensions must not be negative.
std::optional<std::uint64_t> tensor_bytes(std::span<const std::int64_t> shape, DType dtype);

/// Applies rules 1 to 3 of parse_safetensors() to a file of `size` bytes; returns N. `first` is the
/// file's first kTellingBytes, or all its bytes if there are fewer. Refuses files of other formats
/// that users give by mistake: the error says what they are and how to make safetensors of them.
std::size_t header_length(std::span<const std::byte> first, std::uint64_t size,
                          const std::string& what);

/// A header whose content obeys the format.
struct Header {
  std::vector<StoredTensor> tensors{};  // in the order of their bytes
  Metadata metadata{};                  // without the checksums
  FileChecksums checksums{};
};

/// Applies rules 4 to 9 of parse_safetensors(), but for the tensors' checksums, to a file of `size`
/// bytes that begins with `header`. `header` includes the length before it.
Header read_header(std::span<const std::byte> header, std::uint64_t size, const std::string& what);

}  // namespace lockstep::safetensors
