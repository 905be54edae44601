#pragma once
// safetensors files that are larger than the memory they are read into: one tensor at a time.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/io/file.h"
#include "common/io/safetensors.h"

namespace lockstep {

/// A tensor as a header describes it; its bytes are those from `begin` to `end`, counted from the
/// end of the header.
struct StoredTensor {
  std::string name;
  DType dtype = DType::F32;
  std::vector<std::int64_t> shape{};
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// A file that stays on the disk: the header is read and checked at once, the tensors one by one.
class SafetensorsStream {
 public:
  /// Throws what load_safetensors() throws, but for wrong checksums of tensors.
  explicit SafetensorsStream(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  /// As in SafetensorsFile.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const Metadata& metadata() const { return metadata_; }
  Checksums checksums() const {
    return header_checksum_.empty() ? Checksums::none : Checksums::crc32;
  }
  const std::string& header_checksum() const { return header_checksum_; }
  const StoredTensor* find(std::string_view name) const;

  /// The bytes of one of tensors(). Throws BadInput if they have not the checksum that the header
  /// says, EnvironmentError where reading fails.
  std::vector<std::byte> read(const StoredTensor& tensor) const;
  /// Fills `bytes` with the tensor's elements from element `first` on. A checksum is of the whole
  /// tensor: a part is not verified. Throws BadInput if there are not so many.
  void read(const StoredTensor& tensor, std::uint64_t first, std::span<std::byte> bytes) const;

 private:
  InputFile file_;
  std::uint64_t payload_ = 0;  // where the header ends
  std::vector<StoredTensor> tensors_;
  Metadata metadata_;
  std::string header_checksum_;
  std::vector<std::string> checksums_;  // of the tensors, in their order; empty: none
};

}  // namespace lockstep
