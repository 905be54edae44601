#pragma once
// Checksums in safetensors files, which have none of their own: one flipped bit on a disk would
// otherwise be trained with. They stand among the free text, where other readers pass over them:
//
//   "lockstep.crc32.header":          of the 8 length bytes and the header, these 8 digits as zeros
//   "lockstep.crc32.tensor.NAME":     of that tensor's bytes
//
// So the header's covers the tensors', and stands for the whole file. Not for use outside
// common/io: writers ask for Checksums::crc32, and every reader verifies.

#include <cstddef>
#include <span>
#include <string>

#include "common/io/safetensors.h"

namespace lockstep::safetensors {

/// zlib's CRC-32 as 8 hexadecimal digits, as Python's f"{zlib.crc32(data):08x}" gives them.
std::string crc32_digits(std::span<const std::byte> bytes);

/// `metadata` with the tensors' checksums, and zeros in the place of the header's. Throws BadInput
/// for text under a key that is kept for checksums.
Metadata with_checksums(Metadata metadata, std::span<const TensorEntry> tensors);
/// Puts its checksum into a header (and the length before it) that with_checksums() prepared.
/// Returns the digits.
std::string seal_header(std::span<std::byte> header);

/// Takes the checksums out of `metadata` and compares all of them. Returns the header's digits, ""
/// for a file without checksums. Throws BadInput, naming `what`, the tensor, what was found and
/// what expected, for one that is wrong, that is missing, or that belongs to no tensor.
std::string verify_checksums(std::span<const std::byte> header,
                             std::span<const TensorEntry> tensors, Metadata& metadata,
                             const std::string& what);

}  // namespace lockstep::safetensors
