#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "common/core/error.h"
#include "common/core/utf8.h"
#include "common/io/checksums.h"
#include "common/io/file.h"
#include "common/io/json.h"
#include "common/io/safetensors.h"
#include "common/io/safetensors_format.h"

namespace lockstep {
namespace {

using safetensors::in_quotes;
using safetensors::kAlignment;
using safetensors::kLengthBytes;
using safetensors::kMaxHeader;
using safetensors::kMetadataKey;
using Bytes = std::span<const std::byte>;
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
  const auto needed = safetensors::tensor_bytes(tensor.shape, tensor.dtype);
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
    header = header_bytes(tensors, sealed ? safetensors::with_checksums(metadata, all) : metadata);
    if (sealed) header_checksum = safetensors::seal_header(header);
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
