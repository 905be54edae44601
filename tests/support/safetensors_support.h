#pragma once
// Shared by the tests of common/io and the fuzzer. Free of Catch2: the fuzzer has its own main.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/safetensors.h"

namespace lockstep::testing::io {

inline std::vector<std::byte> to_bytes(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

inline std::string to_string(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// A file: the length of `header`, `header`, `payload`; none of them checked.
inline std::string file_of(const std::string& header, const std::string& payload = "") {
  const std::uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file + header + payload;
}

inline bool same_tensor(const TensorEntry& a, const TensorEntry& b) {
  return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape &&
         std::ranges::equal(a.bytes, b.bytes);
}

/// Whether the file has this tensor. Names are unique in a file.
inline bool has_tensor(const SafetensorsFile& file, const TensorEntry& tensor) {
  return std::ranges::any_of(file.tensors(),
                             [&](const TensorEntry& found) { return same_tensor(found, tensor); });
}

/// Checks the parser's promise for any bytes: it throws BadInput (returned here as its text), or it
/// accepts the file (returned as ""). An accepted file must survive being written and read again,
/// and the second writing must give the same bytes; written with checksums, it is accepted, too.
/// Anything else is a std::logic_error.
inline std::string check_parser(std::string_view file) {
  std::string refusal;
  try {
    const SafetensorsFile first = parse_safetensors(to_bytes(file), "fuzzed");
    const auto write = [&](const SafetensorsFile& read) {
      return serialize_safetensors(read.tensors(), read.metadata(), first.checksums());
    };
    const auto written = write(first);
    const SafetensorsFile second = parse_safetensors(written, "rewritten");
    if (write(second) != written || second.checksums() != first.checksums()) {
      throw std::logic_error("the second writing differs from the first");
    }
    parse_safetensors(serialize_safetensors(first.tensors(), first.metadata(), Checksums::crc32),
                      "sealed");
    const auto survives = [&](const TensorEntry& tensor) { return has_tensor(second, tensor); };
    if (first.tensors().size() != second.tensors().size() ||
        first.metadata() != second.metadata() || !std::ranges::all_of(first.tensors(), survives)) {
      throw std::logic_error("what was read differs after writing and reading it again");
    }
  } catch (const BadInput& error) {
    refusal = error.what();
    const bool one_line = refusal.find_first_of("\n\r") == refusal.npos && refusal.size() < 600;
    if (!refusal.starts_with("fuzzed: ") || !one_line || !is_valid_utf8(refusal)) {
      throw std::logic_error("not one line of text that names the file: " + refusal);
    }
  }
  return refusal;
}

}  // namespace lockstep::testing::io
