#pragma once
// What a safetensors header says of the tensors behind it. Not for use outside common/io.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/io/checksums.h"
#include "common/io/safetensors.h"
#include "common/io/safetensors_stream.h"

namespace lockstep::safetensors {

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
