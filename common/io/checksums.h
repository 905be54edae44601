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
#include <vector>

#include "common/io/safetensors.h"

namespace lockstep::safetensors {

/// `metadata` with the tensors' checksums, and zeros in place of the header's. Throws BadInput for
/// text under a key that is reserved for checksums.
Metadata with_checksums(Metadata metadata, std::span<const TensorEntry> tensors);
/// Puts the checksum into a header that with_checksums() prepared (and the length before it).
/// Returns the digits.
std::string seal_header(std::span<std::byte> header);

/// The checksums that a file states for itself: 8 hexadecimal digits each.
struct FileChecksums {
  std::string header{};                // "" for a file without checksums
  std::vector<std::string> tensors{};  // in the order of the names; empty for such a file
};
/// Takes the checksums out of `metadata` and compares the header's. Throws BadInput if that one is
/// wrong, or if a checksum is missing or of no tensor. Errors name `what`, found and expected.
FileChecksums take_checksums(std::span<const std::byte> header, std::span<const std::string> names,
                             Metadata& metadata, const std::string& what);
/// Throws BadInput unless the bytes of tensor `name` have the checksum `expected`.
void verify_tensor(std::span<const std::byte> bytes, const std::string& expected,
                   const std::string& name, const std::string& what);

}  // namespace lockstep::safetensors
