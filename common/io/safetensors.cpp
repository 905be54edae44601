#include "common/io/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/checksums.h"
#include "common/io/json.h"
#include "common/io/safetensors_header.h"

namespace lockstep {

using namespace safetensors;
using Bytes = std::span<const std::byte>;

// --- Element types -------------------------------------------------------------------------------

namespace {

struct Row {
  DType dtype;
  std::string_view name;
  std::size_t size;  // bytes
};

constexpr std::array kRows = {
    Row{DType::BOOL, "BOOL", 1},
    Row{DType::U8, "U8", 1},
    Row{DType::I8, "I8", 1},
    Row{DType::F8_E5M2, "F8_E5M2", 1},
    Row{DType::F8_E4M3, "F8_E4M3", 1},
    Row{DType::F8_E8M0, "F8_E8M0", 1},
    Row{DType::F8_E4M3FNUZ, "F8_E4M3FNUZ", 1},
    Row{DType::F8_E5M2FNUZ, "F8_E5M2FNUZ", 1},
    Row{DType::I16, "I16", 2},
    Row{DType::U16, "U16", 2},
    Row{DType::F16, "F16", 2},
    Row{DType::BF16, "BF16", 2},
    Row{DType::I32, "I32", 4},
    Row{DType::U32, "U32", 4},
    Row{DType::F32, "F32", 4},
    Row{DType::C64, "C64", 8},
    Row{DType::F64, "F64", 8},
    Row{DType::I64, "I64", 8},
    Row{DType::U64, "U64", 8},
};

// Rows are found by index, so each must be at its enumerator's place.
constexpr bool rows_follow_the_enum() {
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    if (static_cast<std::size_t>(kRows[i].dtype) != i) return false;
  }
  return kRows.size() == static_cast<std::size_t>(DType::U64) + 1;
}
static_assert(rows_follow_the_enum());

const Row& row(DType dtype) { return kRows.at(static_cast<std::size_t>(dtype)); }

}  // namespace

std::string_view dtype_name(DType dtype) { return row(dtype).name; }

std::size_t dtype_size(DType dtype) { return row(dtype).size; }

std::optional<DType> dtype_from_name(std::string_view name) {
  const auto found = std::ranges::find(kRows, name, &Row::name);
  if (found == kRows.end()) return std::nullopt;
  return found->dtype;
}

bool is_packed_dtype(std::string_view name) {
  return name == "F4" || name == "F6_E2M3" || name == "F6_E3M2";
}

// --- Reading -------------------------------------------------------------------------------------

SafetensorsFile parse_safetensors(std::vector<std::byte> bytes, const std::string& what) {
  const Bytes all(bytes);
  const Bytes first = all.first(std::min(all.size(), kTellingBytes));
  const Bytes head = all.first(kLengthBytes + header_length(first, all.size(), what));
  Header header = read_header(head, all.size(), what);
  const Bytes payload = all.subspan(head.size());
  std::vector<TensorEntry> tensors;
  for (StoredTensor& stored : header.tensors) {
    tensors.push_back({.name = std::move(stored.name),
                       .dtype = stored.dtype,
                       .shape = std::move(stored.shape),
                       .bytes = payload.subspan(stored.begin, stored.end - stored.begin)});
  }
  for (std::size_t i = 0; i < header.checksums.tensors.size(); ++i) {
    verify_tensor(tensors[i].bytes, header.checksums.tensors[i], tensors[i].name, what);
  }
  return {std::move(bytes), std::move(tensors), std::move(header.metadata),
          std::move(header.checksums.header)};
}

SafetensorsFile load_safetensors(const std::filesystem::path& path) {
  return parse_safetensors(read_file(path), path.string());
}

SafetensorsStream::SafetensorsStream(const std::filesystem::path& path) : file_(path) {
  const std::string what = path.string();
  std::vector<std::byte> head(std::min<std::uint64_t>(file_.size(), kTellingBytes));
  file_.read(0, head);
  head.resize(kLengthBytes + header_length(head, file_.size(), what));
  file_.read(0, head);
  Header header = read_header(head, file_.size(), what);
  payload_ = head.size();
  tensors_ = std::move(header.tensors);
  metadata_ = std::move(header.metadata);
  header_checksum_ = std::move(header.checksums.header);
  checksums_ = std::move(header.checksums.tensors);
}

const StoredTensor* SafetensorsStream::find(std::string_view name) const {
  const auto found = std::ranges::find(tensors_, name, &StoredTensor::name);
  return found == tensors_.end() ? nullptr : &*found;
}

std::vector<std::byte> SafetensorsStream::read(const StoredTensor& tensor) const {
  std::vector<std::byte> bytes(tensor.end - tensor.begin);
  file_.read(payload_ + tensor.begin, bytes);
  if (!checksums_.empty()) {
    const auto at = std::size_t(&tensor - tensors_.data());
    verify_tensor(bytes, checksums_.at(at), tensor.name, path().string());
  }
  return bytes;
}

void SafetensorsStream::read(const StoredTensor& tensor, std::uint64_t first,
                             std::span<std::byte> bytes) const {
  const std::uint64_t size = dtype_size(tensor.dtype), all = tensor.end - tensor.begin;
  require(first <= all / size && bytes.size() <= all - first * size,
          "{}: tensor {} has {} bytes, expected {} from element {} on", path().string(),
          in_quotes(tensor.name), all, bytes.size(), first);
  file_.read(payload_ + tensor.begin + first * size, bytes);
}

// --- Writing -------------------------------------------------------------------------------------

namespace {

using Pointers = std::vector<const TensorEntry*>;

/// `text` as a JSON string, escaped exactly where JSON demands it.
std::string json_string(const std::string& text) {
  require(is_valid_utf8(text), "cannot save {}: a name or text that is not valid UTF-8",
          in_quotes(text));
  return nlohmann::json(text).dump();
}

void check_tensor(const TensorEntry& tensor) {
  const std::string shape = fmt::format("[{}]", fmt::join(tensor.shape, ", "));
  require(tensor.name != kMetadataKey, "cannot save a tensor named {}: the name is reserved",
          kMetadataKey);
  require(std::ranges::all_of(tensor.shape, [](std::int64_t d) { return d >= 0; }),
          "cannot save tensor {}: shape {} has a negative dimension", in_quotes(tensor.name),
          shape);
  const auto needed = tensor_bytes(tensor.shape, tensor.dtype);
  require(needed == tensor.bytes.size(), "cannot save tensor {}: found {} bytes, expected {}{}",
          in_quotes(tensor.name), tensor.bytes.size(), shape, dtype_name(tensor.dtype));
}

/// The order of the file: dtype descending, then name (compared as bytes).
Pointers in_file_order(std::span<const TensorEntry> tensors) {
  Pointers sorted;
  for (const TensorEntry& tensor : tensors) {
    check_tensor(tensor);
    sorted.push_back(&tensor);
  }
  std::ranges::sort(sorted, [](const TensorEntry* a, const TensorEntry* b) {
    return std::tie(b->dtype, a->name) < std::tie(a->dtype, b->name);
  });
  return sorted;
}

void check_unique_names(const Pointers& tensors) {
  std::vector<std::string_view> names;
  for (const TensorEntry* tensor : tensors) names.push_back(tensor->name);
  std::ranges::sort(names);
  const auto twice = std::ranges::adjacent_find(names);
  require(twice == names.end(), "cannot save two tensors of one name: {}",
          twice == names.end() ? "" : in_quotes(*twice));
}

std::string metadata_json(const Metadata& metadata) {
  std::vector<std::string> items;
  for (const auto& [key, value] : metadata) {
    items.push_back(json_string(key) + ":" + json_string(value));
  }
  return fmt::format("\"{}\":{{{}}}", kMetadataKey, fmt::join(items, ","));
}

/// The JSON text, padded so that the tensors after it are aligned.
std::string header_json(const Pointers& sorted, const Metadata& metadata) {
  std::vector<std::string> items;
  if (!metadata.empty()) items.push_back(metadata_json(metadata));
  std::size_t begin = 0;
  for (const TensorEntry* tensor : sorted) {
    const std::size_t end = begin + tensor->bytes.size();
    items.push_back(fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                                json_string(tensor->name), dtype_name(tensor->dtype),
                                fmt::join(tensor->shape, ","), begin, end));
    begin = end;
  }
  std::string text = fmt::format("{{{}}}", fmt::join(items, ","));
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  require(text.size() <= kMaxHeader, "cannot save: the header has {} bytes, expected at most {}",
          text.size(), kMaxHeader);
  return text;
}

/// The header with its length in front.
std::vector<std::byte> header_bytes(const Pointers& sorted, const Metadata& metadata) {
  const std::string text = header_json(sorted, metadata);
  const std::uint64_t length = text.size();
  std::vector<std::byte> bytes(kLengthBytes + text.size());
  std::memcpy(bytes.data(), &length, kLengthBytes);
  std::memcpy(bytes.data() + kLengthBytes, text.data(), text.size());
  return bytes;
}

/// A file in pieces: what it takes to write it without copying the tensors.
struct Layout {
  Layout(std::span<const TensorEntry> all, const Metadata& metadata, Checksums checksums)
      : tensors(in_file_order(all)) {
    check_unique_names(tensors);
    const bool sealed = checksums == Checksums::crc32;
    header = header_bytes(tensors, sealed ? with_checksums(metadata, all) : metadata);
    if (sealed) header_checksum = seal_header(header);
  }

  Pointers tensors;
  std::vector<std::byte> header{};
  std::string header_checksum{};
};

}  // namespace

std::vector<std::byte> serialize_safetensors(std::span<const TensorEntry> tensors,
                                             const Metadata& metadata, Checksums checksums) {
  const Layout layout(tensors, metadata, checksums);
  std::vector<std::byte> file = layout.header;
  for (const TensorEntry* tensor : layout.tensors) {
    file.insert(file.end(), tensor->bytes.begin(), tensor->bytes.end());
  }
  return file;
}

std::string save_safetensors(const std::filesystem::path& path,
                             std::span<const TensorEntry> tensors, const Metadata& metadata,
                             Checksums checksums) {
  const Layout layout(tensors, metadata, checksums);
  std::vector<Bytes> pieces = {layout.header};
  for (const TensorEntry* tensor : layout.tensors) pieces.push_back(tensor->bytes);
  write_file_atomically(path, pieces);
  return layout.header_checksum;
}

}  // namespace lockstep
