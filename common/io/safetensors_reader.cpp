#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include "common/core/error.h"
#include "common/core/listed.h"
#include "common/io/checksums.h"
#include "common/io/file.h"
#include "common/io/json.h"
#include "common/io/safetensors.h"
#include "common/io/safetensors_format.h"
#include "common/io/utf8.h"

namespace lockstep {
namespace {

using nlohmann::json;
using safetensors::clipped;
using safetensors::in_quotes;
using safetensors::kLengthBytes;
using safetensors::kMaxHeader;
using safetensors::kMetadataKey;
using Bytes = std::span<const std::byte>;

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

/// A tensor as the header describes it; offsets count from the end of the header.
struct Entry {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin;
  std::uint64_t end;
};

/// Rules 1 to 4: the header's text.
std::string_view header_text(Bytes file, const std::string& what) {
  require(file.size() >= kLengthBytes,
          "{}: found {} bytes, expected at least 8 (the length of the header); the file is "
          "truncated or not a safetensors file",
          what, file.size());
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  require(length <= kMaxHeader,
          "{}: the header claims {} bytes, expected at most {}; probably not a safetensors file",
          what, length, kMaxHeader);
  const std::size_t rest = file.size() - kLengthBytes;
  require(length <= rest,
          "{}: the header claims {} bytes, but only {} follow; the file is truncated, get it again",
          what, length, rest);

  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes, length);
  const std::size_t invalid = find_invalid_utf8(text);
  require(invalid == text.size(),
          "{}: the header is not valid UTF-8 at its byte {} of {}; the file is damaged", what,
          invalid, text.size());
  return text;
}

/// Refuses what a JSON tree no longer shows (an object that has a key twice) or should never be
/// built from (nesting that no valid header has). A pass of its own: json::parse with a callback
/// looks through all siblings whenever an object ends, which is quadratic.
class KeyChecker final : public nlohmann::json_sax<json> {
 public:
  explicit KeyChecker(const std::string& what) : what_(what) {}

  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    require(keys_.back().insert(name).second, "{}: the header has the key {} twice, expected once",
            what_, in_quotes(name));
    return true;
  }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool parse_error(std::size_t, const std::string&, const json::exception&) override {
    return false;  // json::parse will say it
  }

 private:
  bool open() {
    require(keys_.size() < 3, "{}: the header nests deeper than {{name: {{shape: [...]}}}}", what_);
    keys_.emplace_back();
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  const std::string& what_;
  std::vector<std::set<std::string>> keys_;  // those met so far in each open object
};

/// Rule 5, first half: the header as a JSON object without duplicate keys.
json parse_object(std::string_view text, const std::string& what) {
  // The parser would skip a byte order mark and would take a zero byte for the end of the text.
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  require(first != text.npos && text[first] == '{',
          "{}: the header is not a JSON object: found {}, expected '{{'", what,
          first == text.npos ? "no text" : in_quotes(clipped(text.substr(first), 10)));
  const std::size_t zero = text.find('\0');
  require(zero == text.npos, "{}: the header is not valid JSON: a zero byte at its byte {}", what,
          zero);
  try {
    KeyChecker checker(what);
    json::sax_parse(text, &checker);
    return json::parse(text);
  } catch (const json::exception& error) {
    std::string_view reason = error.what();
    reason.remove_prefix(std::min(reason.find("] ") + 2, reason.size()));  // "[json.exception...] "
    fail<BadInput>("{}: the header is not valid JSON: {}", what, clipped(reason, 200));
  }
}

/// What cannot be used, as errors show it.
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
Entry parse_entry(const std::string& name, const json& object) {
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
void check_offsets(const Entry& entry, std::uint64_t previous_end) {
  require(entry.begin <= previous_end, "begins at byte {}, expected {}: a hole before it",
          entry.begin, previous_end);
  require(entry.begin == previous_end,
          "begins at byte {}, expected {}: overlap with the tensor before it", entry.begin,
          previous_end);
  require(entry.end >= entry.begin, "ends at byte {}, before it begins at {}", entry.end,
          entry.begin);
}

/// Rule 7: a tensor has the bytes that its shape and dtype need.
void check_size(const Entry& entry) {
  const auto needed = safetensors::tensor_bytes(entry.shape, entry.dtype);
  const std::uint64_t bytes = entry.end - entry.begin;
  if (needed == bytes) return;
  const std::string shape = fmt::format("[{}]", listed(entry.shape));
  require(needed.has_value(), "overflow: shape {} of {} exceeds 2^64 bytes", shape,
          dtype_name(entry.dtype));
  fail<BadInput>("{} bytes, expected {} for shape {} of {}", bytes, *needed, shape,
                 dtype_name(entry.dtype));
}

/// Rule 8: the tensors fill the rest of the file, `payload` bytes.
void check_end(std::span<const Entry> entries, std::size_t payload, const std::string& what) {
  const std::uint64_t end = entries.empty() ? 0 : entries.back().end;
  require(end <= payload,
          "{}: found {} bytes after the header, expected {}; the file is truncated, get it again",
          what, payload, end);
  require(end == payload, "{}: found {} bytes after the header, expected {}: {} trailing bytes",
          what, payload, end, payload - end);
}

}  // namespace

SafetensorsFile parse_safetensors(std::vector<std::byte> bytes, const std::string& what) {
  const std::string_view text = header_text(bytes, what);
  const json header = parse_object(text, what);

  Metadata metadata;
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadataKey) {
      metadata = parse_metadata(value, what);
    } else {
      about(what, name, [&] { entries.push_back(parse_entry(name, value)); });
    }
  }
  // The third key gives empty tensors at the same place a fixed order.
  std::ranges::sort(entries, {}, [](const Entry& e) { return std::tie(e.begin, e.end, e.name); });

  const Bytes head = Bytes(bytes).first(kLengthBytes + text.size());
  const Bytes payload = Bytes(bytes).subspan(head.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    about(what, entries[i].name,
          [&] { check_offsets(entries[i], i == 0 ? 0 : entries[i - 1].end); });
  }
  for (const Entry& entry : entries) about(what, entry.name, [&] { check_size(entry); });
  check_end(entries, payload.size(), what);

  std::vector<TensorEntry> tensors;
  for (Entry& entry : entries) {
    tensors.push_back({.name = std::move(entry.name),
                       .dtype = entry.dtype,
                       .shape = std::move(entry.shape),
                       .bytes = payload.subspan(entry.begin, entry.end - entry.begin)});
  }
  std::string checksum = safetensors::verify_checksums(head, tensors, metadata, what);
  return {std::move(bytes), std::move(tensors), std::move(metadata), std::move(checksum)};
}

namespace {

/// What torch.save() writes, in its new form or its old one, is often tried.
void refuse_pickles(Bytes file, const std::string& what) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  require(!text.starts_with("PK\x03\x04") && !text.starts_with("\x80\x02"),
          "{}: found a file of torch.save(), expected safetensors; in Python: "
          "safetensors.torch.save_file(model.state_dict(), \"weights.safetensors\")",
          what);
}

}  // namespace

SafetensorsFile load_safetensors(const std::filesystem::path& path) {
  std::vector<std::byte> bytes = read_file(path);
  refuse_pickles(bytes, path.string());
  return parse_safetensors(std::move(bytes), path.string());
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::ranges::find(tensors_, name, &TensorEntry::name);
  return found == tensors_.end() ? nullptr : &*found;
}

}  // namespace lockstep
