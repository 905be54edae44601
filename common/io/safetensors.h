#pragma once
// safetensors: the file format of weights and checkpoints, shared with PyTorch and others.
//
//   8 bytes    N, little-endian: the length of the header
//   N bytes    JSON: {"conv1.weight": {"dtype": "F32", "shape": [10, 1, 5, 5],
//                                      "data_offsets": [0, 1000]}, ...,
//                     "__metadata__": {"format": "pt"}}
//   the rest   the tensors' bytes, C order, little-endian, without holes
//
// The reader refuses whatever is not exactly that; the writer produces, byte for byte, what the
// reference implementation does. Source: github.com/huggingface/safetensors, README.md and
// safetensors/src/tensor.rs.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/io/file.h"

namespace lockstep {

/// Element types under the names that the format gives them, whole bytes only. The order is that of
/// the reference implementation (`Dtype` in its tensor.rs): ascending alignment. The writer sorts
/// by this order, which therefore decides the bytes of every file we write.
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

/// One tensor of a file: a name, and a view of bytes owned elsewhere.
struct TensorEntry {
  std::string name;
  DType dtype = DType::F32;
  /// `{}` is a scalar; a dimension may be 0.
  std::vector<std::int64_t> shape;
  /// C order, little-endian. Not necessarily aligned for `dtype`: memcpy, do not cast.
  std::span<const std::byte> bytes;
};

/// The free text of a file (`__metadata__`).
using Metadata = std::map<std::string, std::string>;

/// Whether a file protects itself against flipped bits (checksums.h).
enum class Checksums { none, crc32 };

/// A file in memory. Owns the only copy of the bytes that the entries view, and so is move-only.
class SafetensorsFile {
 public:
  SafetensorsFile(std::vector<std::byte> bytes, std::vector<TensorEntry> tensors, Metadata metadata,
                  std::string header_checksum)
      : bytes_(std::move(bytes)),
        tensors_(std::move(tensors)),
        metadata_(std::move(metadata)),
        header_checksum_(std::move(header_checksum)) {}
  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;

  /// The tensors in the order of their bytes.
  const std::vector<TensorEntry>& tensors() const { return tensors_; }
  /// The free text without the checksums.
  const Metadata& metadata() const { return metadata_; }
  /// Whether the file had checksums, which were right; PyTorch's files have none.
  Checksums checksums() const {
    return header_checksum_.empty() ? Checksums::none : Checksums::crc32;
  }
  /// 8 hexadecimal digits that identify the whole file; "" without checksums.
  const std::string& header_checksum() const { return header_checksum_; }

 private:
  std::vector<std::byte> bytes_;
  std::vector<TensorEntry> tensors_;
  Metadata metadata_;
  std::string header_checksum_;
};

/// Reads and checks a file. Throws BadInput for every breach of the format (parse_safetensors) and
/// for a file that cannot be opened, EnvironmentError where reading fails.
SafetensorsFile load_safetensors(const std::filesystem::path& path);

/// The same from memory; errors use `what` as the file name. Every breach is a BadInput with a text
/// of its own, in the order of the reference reader:
///   1. at least 8 bytes;             2. N at most 100,000,000;
///   3. N bytes are there;            4. they are UTF-8;
///   5. one JSON object of entries {dtype, shape, data_offsets} and strings under __metadata__;
///   6. sorted by data_offsets, each tensor begins where the one before ends, the first at 0;
///   7. elements times element size, without overflow, is the number of bytes;
///   8. the last tensor ends where the file ends;
///   9. where there are checksums, there is one for everything, and all are right.
/// White space around the object is accepted, since writers may pad. This reader is stricter than
/// the reference. It refuses a key that occurs twice: the format forbids it, but the reference's
/// parser does not notice. A null __metadata__ and dimensions from 2^63 on are refused. Other
/// fields of an entry than the three are refused, as they could change what the bytes mean. So are
/// the types that share bytes (F4, F6_*).
SafetensorsFile parse_safetensors(std::vector<std::byte> bytes, const std::string& what);

/// A tensor as a header describes it; its bytes are those from `begin` to `end`, counted from the
/// end of the header.
struct StoredTensor {
  std::string name;
  DType dtype = DType::F32;
  std::vector<std::int64_t> shape{};
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// A file that stays on the disk, and may be larger than the memory. The header is read and checked
/// at once, the tensors one by one.
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
  /// The tensor with that name, or null.
  const StoredTensor* find(std::string_view name) const;

  /// The bytes of one of tensors(). Throws BadInput if the header says another checksum than they
  /// have, EnvironmentError if reading fails.
  std::vector<std::byte> read(const StoredTensor& tensor) const;
  /// Fills `bytes` with the tensor's elements from element `first` on. A checksum is of the whole
  /// tensor, so a part is not verified. Throws BadInput if the tensor has too few elements.
  void read(const StoredTensor& tensor, std::uint64_t first, std::span<std::byte> bytes) const;

 private:
  InputFile file_;
  std::uint64_t payload_ = 0;  // where the header ends
  std::vector<StoredTensor> tensors_;
  Metadata metadata_;
  std::string header_checksum_;
  std::vector<std::string> checksums_;  // of the tensors, in their order; empty: none
};

/// The canonical file of these tensors, whatever their order. Tensors are sorted by dtype, largest
/// alignment first (so that every tensor is aligned), then by name. `__metadata__` comes first, if
/// not empty. Spaces pad the header to a multiple of 8. Throws BadInput if a name occurs twice, is
/// "__metadata__" or not UTF-8, if bytes and shape disagree, or if the header gets too large.
std::vector<std::byte> serialize_safetensors(std::span<const TensorEntry> tensors,
                                             const Metadata& metadata = {},
                                             Checksums checksums = Checksums::none);

/// Writes that file, atomically and durably (write_file_atomically), without a copy of the tensors.
/// Returns its header_checksum().
std::string save_safetensors(const std::filesystem::path& path,
                             std::span<const TensorEntry> tensors, const Metadata& metadata = {},
                             Checksums checksums = Checksums::none);

}  // namespace lockstep
