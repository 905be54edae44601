#include "common/io/checksums.h"

#include <zlib.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "common/core/error.h"
#include "common/io/json.h"

namespace lockstep::safetensors {
namespace {

constexpr const char* kChecksumKeys = "lockstep.crc32.";  // how all the keys begin
constexpr const char* kHeaderKey = "lockstep.crc32.header";
constexpr const char* kTensorKeys = "lockstep.crc32.tensor.";  // a tensor may be named "header"
constexpr std::string_view kZeros = "00000000";

std::string key_of(const std::string& tensor) { return kTensorKeys + tensor; }
std::string in_words(const std::string& tensor) { return "tensor " + in_quotes(tensor); }

/// zlib's CRC-32 as 8 hexadecimal digits, as Python's f"{zlib.crc32(data):08x}" gives them.
std::string crc32_digits(std::span<const std::byte> bytes) {
  const auto* data = reinterpret_cast<const Bytef*>(bytes.data());
  // With a null pointer zlib gives its initial value, which is the checksum of no bytes.
  return fmt::format("{:08x}", bytes.empty() ? 0 : crc32_z(0, data, bytes.size()));
}

/// Where the header's own digits begin in it; npos if they are not there as we write them. Inside a
/// JSON string a quotation mark has a backslash before it, so no name looks like this.
std::size_t digits_at(std::string_view header) {
  for (const char before : {'{', ','}) {
    const std::string key = fmt::format("{}\"{}\":\"", before, kHeaderKey);
    const std::size_t found = header.find(key);
    if (found == header.npos) continue;
    const std::size_t digits = found + key.size();
    if (digits + kZeros.size() < header.size()) return digits;
  }
  return header.npos;
}

/// The checksum of a header as it was before its digits were put in.
std::string checksum_of_header(std::span<const std::byte> header, std::size_t digits) {
  std::vector<std::byte> zeroed(header.begin(), header.end());
  std::fill_n(zeroed.begin() + static_cast<std::ptrdiff_t>(digits), kZeros.size(), std::byte{'0'});
  return crc32_digits(zeroed);
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Removes the value of `key` and returns it.
std::string take(Metadata& checksums, const std::string& key, const std::string& what,
                 const std::string& whose) {
  const auto found = checksums.find(key);
  require(found != checksums.end(),
          "{}: found no checksum of {}, expected one since others are there; the file is damaged, "
          "take another copy",
          what, whose);
  return checksums.extract(found).mapped();
}

void compare(const std::string& found, const std::string& expected, const std::string& what,
             const std::string& whose) {
  require(found == expected,
          "{}: {} has the checksum {}, expected {}; the file is damaged, take another copy", what,
          whose, found, in_quotes(expected));
}

}  // namespace

Metadata with_checksums(Metadata metadata, std::span<const TensorEntry> tensors) {
  const auto reserved = std::ranges::find_if(
      metadata, [](const auto& item) { return item.first.starts_with(kChecksumKeys); });
  require(reserved == metadata.end(), "cannot save the text {}: the name is kept for checksums",
          reserved == metadata.end() ? "" : in_quotes(reserved->first));
  for (const TensorEntry& tensor : tensors) {
    metadata[key_of(tensor.name)] = crc32_digits(tensor.bytes);
  }
  metadata[kHeaderKey] = kZeros;
  return metadata;
}

std::string seal_header(std::span<std::byte> header) {
  const std::size_t at = digits_at(text_of(header));
  const std::string digits = checksum_of_header(header, at);
  std::ranges::copy(std::as_bytes(std::span(digits)),
                    header.begin() + static_cast<std::ptrdiff_t>(at));
  return digits;
}

FileChecksums take_checksums(std::span<const std::byte> header, std::span<const std::string> names,
                             Metadata& metadata, const std::string& what) {
  Metadata checksums;
  for (auto item = metadata.begin(); item != metadata.end();) {
    const auto next = std::next(item);
    if (item->first.starts_with(kChecksumKeys)) checksums.insert(metadata.extract(item));
    item = next;
  }
  if (checksums.empty()) return {};

  FileChecksums taken{.header = take(checksums, kHeaderKey, what, "the header")};
  const std::size_t at = digits_at(text_of(header));
  require(at != std::string_view::npos,
          "{}: the header's checksum is not where Lockstep writes it: another program has "
          "written the file anew; take the original, or save it without the texts {}*",
          what, kChecksumKeys);
  compare(checksum_of_header(header, at), taken.header, what, "the header");
  for (const std::string& name : names) {
    taken.tensors.push_back(take(checksums, key_of(name), what, in_words(name)));
  }
  require(checksums.empty(), "{}: found {}, expected a tensor of that name; take another copy",
          what, checksums.empty() ? "" : in_quotes(checksums.begin()->first));
  return taken;
}

void verify_tensor(std::span<const std::byte> bytes, const std::string& expected,
                   const std::string& name, const std::string& what) {
  compare(crc32_digits(bytes), expected, what, in_words(name));
}

}  // namespace lockstep::safetensors
