#include "common/io/safetensors_header.h"

#include <algorithm>
#include <bit>
#include <cctype>
#include <limits>
#include <tuple>
#include <utility>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/json.h"

namespace lockstep::safetensors {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

// --- Files of other formats ----------------------------------------------------------------------

namespace {

constexpr const char* kTorchSave =
    "a file of torch.save(), expected safetensors; in Python: "
    "safetensors.torch.save_file(model.state_dict(), \"weights.safetensors\")";
constexpr std::string_view kZip = "PK\x03\x04";

struct Format {
  std::string_view begin;
  const char* found_and_advice;
};
constexpr Format kFormats[] = {
    {"\x80\x02", kTorchSave},  // a pickle of protocol 2
    {"\x80\x03",
     "a pickle of Python (protocol 3), expected safetensors; load it where it was made, "
     "and save its arrays with safetensors.numpy.save_file()"},
    {"\x80\x04",
     "a pickle of Python (protocol 4), expected safetensors; load it where it was made, "
     "and save its arrays with safetensors.numpy.save_file()"},
    {"\x80\x05",
     "a pickle of Python (protocol 5), expected safetensors; load it where it was made, "
     "and save its arrays with safetensors.numpy.save_file()"},
    {"\x93NUMPY",
     "one array of numpy.save() (.npy), expected safetensors; save all arrays by their "
     "names with safetensors.numpy.save_file()"},
    {"version https://git-lfs",
     "a pointer of Git LFS, not the file that it stands for; fetch that "
     "with: git lfs pull"},
    {"GGUF", "a GGUF file (llama.cpp), expected safetensors; take those that it was made from"},
    {"\x89HDF\r\n\x1a\n",
     "an HDF5 file (Keras, h5py), expected safetensors; load it where it was "
     "made, and save its arrays with safetensors.numpy.save_file()"},
    {"\x1f\x8b", "gzip data, expected safetensors; unpack it first (gunzip)"},
};

/// The name of the first member of a ZIP archive: bytes 26 and 27 are its length, it begins at 30.
std::string_view first_member(std::string_view zip) {
  if (zip.size() < 30) return {};
  const size_t length =
      static_cast<unsigned char>(zip[26]) + 256 * static_cast<unsigned char>(zip[27]);
  return zip.substr(30, length);
}

bool is_web_page(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
  const auto begins = [&](std::string_view tag) {
    return std::ranges::equal(text.substr(0, tag.size()), tag, {},
                              [](unsigned char c) { return char(std::tolower(c)); });
  };
  return begins("<!doctype html") || begins("<html");
}

/// What such a file is, and what to do; null for one that is not known.
const char* found_and_advice(std::string_view text) {
  if (text.starts_with(kZip)) {
    return first_member(text).ends_with(".npy")
               ? "a file of numpy.savez() (.npz), expected safetensors; in Python: "
                 "safetensors.numpy.save_file(dict(numpy.load(FILE)), \"weights.safetensors\")"
               : kTorchSave;
  }
  if (is_web_page(text)) {
    return "a web page (HTML), expected safetensors; what was downloaded is an error or a log-in, "
           "get the file itself";
  }
  constexpr size_t kTarMark = 257;  // POSIX.1-1988, ustar
  if (text.size() > kTarMark && text.substr(kTarMark).starts_with("ustar")) {
    return "a tar archive, expected safetensors; unpack it first (tar -xf)";
  }
  const auto* const format = std::ranges::find_if(
      kFormats, [&](const Format& each) { return text.starts_with(each.begin); });
  return format == std::end(kFormats) ? nullptr : format->found_and_advice;
}

void refuse_foreign(std::span<const std::byte> first, const std::string& what) {
  const char* const found =
      found_and_advice({reinterpret_cast<const char*>(first.data()), first.size()});
  if (found != nullptr) fail<BadInput>("{}: found {}", what, found);
}

// --- The header as JSON --------------------------------------------------------------------------

std::string_view header_text(std::span<const std::byte> header, const std::string& what) {
  const std::string_view text(reinterpret_cast<const char*>(header.data()) + kLengthBytes,
                              header.size() - kLengthBytes);
  const std::size_t invalid = find_invalid_utf8(text);
  require(invalid == text.size(),
          "{}: the header is not valid UTF-8 at its byte {} of {}; the file is damaged", what,
          invalid, text.size());
  return text;
}

json parse_header(std::string_view text, const std::string& what) {
  // The parser would skip a byte order mark.
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  require(first != text.npos && text[first] == '{',
          "{}: the header is not a JSON object: found {}, expected '{{'", what,
          first == text.npos ? "no text" : in_quotes(clipped(text.substr(first), 10)));
  return parse_strictly(text, what + ": the header", 3);  // {name: {shape: [...]}}
}

// --- What the header says ------------------------------------------------------------------------

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

std::size_t header_length(std::span<const std::byte> first, std::uint64_t size,
                          const std::string& what) {
  std::uint64_t length = 0;
  std::copy_n(first.begin(), std::min(first.size(), kLengthBytes),
              reinterpret_cast<std::byte*>(&length));
  const std::uint64_t rest = size - std::min<std::uint64_t>(size, kLengthBytes);
  // A header of 640 bytes begins like a pickle, but then an object follows.
  const bool no_object =
      first.size() > kLengthBytes &&
      std::string_view("{ \t\r\n").find(char(first[kLengthBytes])) == std::string_view::npos;
  if (no_object || length > std::min<std::uint64_t>(rest, kMaxHeader)) refuse_foreign(first, what);
  require(size >= kLengthBytes,
          "{}: found {} bytes, expected at least 8 (the length of the header); the file is "
          "truncated or not a safetensors file",
          what, size);
  require(length <= kMaxHeader,
          "{}: the header claims {} bytes, expected at most {}; probably not a safetensors file",
          what, length, kMaxHeader);
  require(length <= rest,
          "{}: the header claims {} bytes, but only {} follow; the file is truncated, get it again",
          what, length, rest);
  return length;
}

std::optional<std::uint64_t> tensor_bytes(std::span<const std::int64_t> shape, DType dtype) {
  std::uint64_t product = 1;
  for (const std::int64_t dimension : shape) {
    if (__builtin_mul_overflow(product, static_cast<std::uint64_t>(dimension), &product)) return {};
  }
  if (__builtin_mul_overflow(product, std::uint64_t{dtype_size(dtype)}, &product)) return {};
  return product;
}

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
