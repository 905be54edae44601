#include "common/io/safetensors_entries.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <tuple>
#include <utility>

#include "common/core/error.h"
#include "common/core/listed.h"
#include "common/io/json.h"
#include "common/io/safetensors_format.h"
#include "common/io/safetensors_header.h"

namespace lockstep::safetensors {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

/// An unusable value, as errors show it.
std::string shown(const json& value) { return clipped(value.dump()); }

Metadata parse_metadata(const json& object, const std::string& what) {
  if (!object.is_object()) {
    fail<BadInput>("{}: {} is {}, expected an object of strings", what, kMetadataKey,
                   shown(object));
  }
  Metadata metadata;
  for (const auto& [key, value] : object.items()) {
    if (!value.is_string()) {
      fail<BadInput>("{}: {} {} is {}, expected a string", what, kMetadataKey, in_quotes(key),
                     shown(value));
    }
    metadata.emplace(key, value.get<std::string>());
  }
  return metadata;
}

std::uint64_t parse_whole_number(const json& value, const char* field) {
  if (!value.is_number_unsigned()) {
    fail<BadInput>("{} holds {}, expected a whole number from 0 to 2^64 - 1", field, shown(value));
  }
  return value.get<std::uint64_t>();
}

DType parse_dtype(const json& value) {
  if (!value.is_string()) {
    fail<BadInput>("dtype is {}, expected a string such as \"F32\"", shown(value));
  }
  const auto name = value.get<std::string>();
  require(!is_packed_dtype(name),
          "dtype {} packs several elements into a byte, which is not supported; convert the tensor "
          "to F32",
          name);
  const std::optional<DType> dtype = dtype_from_name(name);
  if (!dtype) fail<BadInput>("dtype {} is unknown, expected F32, F64, I64, ...", in_quotes(name));
  return *dtype;
}

std::vector<std::int64_t> parse_shape(const json& value) {
  if (!value.is_array()) fail<BadInput>("shape is {}, expected an array", shown(value));
  std::vector<std::int64_t> shape;
  shape.reserve(value.size());
  for (const json& item : value) {
    const std::uint64_t dimension = parse_whole_number(item, "shape");
    require(dimension <= std::numeric_limits<std::int64_t>::max(),
            "shape holds {}: overflow, expected less than 2^63", dimension);
    shape.push_back(static_cast<std::int64_t>(dimension));
  }
  return shape;
}

/// Rule 5, second half: one entry of the header.
StoredTensor parse_entry(const std::string& name, const json& object) {
  if (!object.is_object()) fail<BadInput>("found {}, expected an object", shown(object));
  for (const char* field : {"dtype", "shape", "data_offsets"}) {
    require(object.contains(field), "it has no {}", field);
  }
  for (const auto& [field, value] : object.items()) {
    if (field != "dtype" && field != "shape" && field != "data_offsets") {
      fail<BadInput>("it has the unknown field {}, expected dtype, shape and data_offsets only",
                     in_quotes(field));
    }
  }
  const json& offsets = object["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) {
    fail<BadInput>("data_offsets is {}, expected [begin, end]", shown(offsets));
  }
  return {.name = name,
          .dtype = parse_dtype(object["dtype"]),
          .shape = parse_shape(object["shape"]),
          .begin = parse_whole_number(offsets[0], "data_offsets"),
          .end = parse_whole_number(offsets[1], "data_offsets")};
}

/// Calls work(), whose errors are about this tensor.
template <class Work>
void about(const std::string& what, const std::string& name, Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    error.throw_within(fmt::format("{}: tensor {}", what, in_quotes(name)));
  }
}

/// Rule 6: the sorted tensors cover their bytes without a hole and without overlap. A hole could
/// hide a second file, an overlap could blow up the memory.
void check_offsets(const StoredTensor& entry, std::uint64_t previous_end) {
  require(entry.begin <= previous_end, "begins at byte {}, expected {}: a hole before it",
          entry.begin, previous_end);
  require(entry.begin == previous_end,
          "begins at byte {}, expected {}: overlap with the tensor before it", entry.begin,
          previous_end);
  require(entry.end >= entry.begin, "ends at byte {}, before it begins at {}", entry.end,
          entry.begin);
}

/// Rule 7: a tensor has the bytes that its shape and dtype need.
void check_size(const StoredTensor& entry) {
  const auto needed = tensor_bytes(entry.shape, entry.dtype);
  const std::uint64_t bytes = entry.end - entry.begin;
  if (needed == bytes) return;
  const std::string shape = fmt::format("[{}]", listed(entry.shape));
  require(needed.has_value(), "overflow: shape {} of {} exceeds 2^64 bytes", shape,
          dtype_name(entry.dtype));
  fail<BadInput>("{} bytes, expected {} for shape {} of {}", bytes, *needed, shape,
                 dtype_name(entry.dtype));
}

/// Rule 8: the tensors fill the rest of the file, `payload` bytes.
void check_end(std::span<const StoredTensor> entries, std::uint64_t payload,
               const std::string& what) {
  const std::uint64_t end = entries.empty() ? 0 : entries.back().end;
  require(end <= payload,
          "{}: found {} bytes after the header, expected {}; the file is truncated, get it again",
          what, payload, end);
  require(end == payload, "{}: found {} bytes after the header, expected {}: {} trailing bytes",
          what, payload, end, payload - end);
}

/// Rules 6 to 8.
void check_places(std::span<const StoredTensor> entries, std::uint64_t payload,
                  const std::string& what) {
  for (std::size_t i = 0; i < entries.size(); ++i) {
    about(what, entries[i].name,
          [&] { check_offsets(entries[i], i == 0 ? 0 : entries[i - 1].end); });
  }
  for (const StoredTensor& entry : entries) about(what, entry.name, [&] { check_size(entry); });
  check_end(entries, payload, what);
}

}  // namespace

Header read_header(std::span<const std::byte> header, std::uint64_t size, const std::string& what) {
  Header read;
  const json content = parse_header(header_text(header, what), what);
  for (const auto& item : content.items()) {
    if (item.key() == kMetadataKey) {
      read.metadata = parse_metadata(item.value(), what);
    } else {
      about(what, item.key(),
            [&] { read.tensors.push_back(parse_entry(item.key(), item.value())); });
    }
  }
  // The third key gives empty tensors at the same place a fixed order.
  std::ranges::sort(read.tensors, {},
                    [](const StoredTensor& e) { return std::tie(e.begin, e.end, e.name); });
  check_places(read.tensors, size - header.size(), what);
  std::vector<std::string> names;
  for (const StoredTensor& tensor : read.tensors) names.push_back(tensor.name);
  read.checksums = take_checksums(header, names, read.metadata, what);
  return read;
}

}  // namespace lockstep::safetensors
