#pragma once
// Checksums in safetensors files, which have none of their own: one flipped bit on a disk would
// otherwise be trained with. They are part of the free text, where other readers ignore them:
//
//   "lockstep.crc32.header":          of the 8 length bytes and the header, with zeros here
//   "lockstep.crc32.tensor.NAME":     of that tensor's bytes
//
// So the header's checksum covers those of the tensors, and identifies the whole file. Not for use
// outside common/io: writers ask for Checksums::crc32, and every reader verifies.

#include <cstddef>
#include <span>
#include <string>

#include "common/io/safetensors.h"

namespace lockstep::safetensors {

/// zlib's CRC-32 as 8 hexadecimal digits, as Python's f"{zlib.crc32(data):08x}" gives them.
std::string crc32_digits(std::span<const std::byte> bytes);

/// `metadata` with the tensors' checksums, and zeros in place of the header's. Throws BadInput for
/// text under a key that is reserved for checksums.
Metadata with_checksums(Metadata metadata, std::span<const TensorEntry> tensors);
/// Takes a header (and the length before it) that with_checksums() prepared and puts its checksum
/// in. Returns the digits.
std::string seal_header(std::span<std::byte> header);

/// Takes the checksums out of `metadata` and compares all of them. Returns the header's digits, ""
/// for a file without checksums. Throws BadInput, naming `what`, the tensor, what was found and
/// what expected, for a checksum that is wrong, missing, or of no tensor.
std::string verify_checksums(std::span<const std::byte> header,
                             std::span<const TensorEntry> tensors, Metadata& metadata,
                             const std::string& what);

}  // namespace lockstep::safetensors
